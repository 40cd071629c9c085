import { describe, expect, it } from "vitest";
import type { Action } from "../src/state/actions";
import { initialState, NEW_CHAT, NEW_SYSTEM_PROMPT, type State } from "../src/state/model";
import { reduce } from "../src/state/reduce";
import { blockedBy, isSending, sendFailure, windowNotice } from "../src/state/select";
import type { Message } from "../src/wire/types";
import { afterFrames, answer, created, delta, done, message, SESSION, session, started, turn } from "./samples";

function after(actions: readonly Action[], state: State = initialState): State {
  return actions.reduce(reduce, state);
}

const opened: Action = { type: "opened", session: SESSION };
const drafted: Action = { type: "drafted", key: SESSION, text: "Hi" };
const sending: Action = { type: "sending", session: SESSION, frameId: "f1", clientMsgId: "c1", text: "Hi" };
const failure = { code: "queue_full", message: "Too many wait.", retryable: true };

describe("a draft", () => {
  const { message: question, reply, generation } = turn();
  const ack: Action = {
    type: "frame",
    frame: { type: "ack", re: "f1", data: { message: question, reply, generation } },
  };

  it("goes when its message is acknowledged, and the turn is shown", () => {
    const state = after([opened, drafted, sending, ack]);
    expect(state.drafts).toEqual({});
    expect(isSending(state)).toBe(false);
    expect(state.chats[SESSION]?.messages.map((one) => one.id)).toEqual(["msg_1a", "msg_1b"]);
  });

  it("stays when it was changed meanwhile", () => {
    const state = after([opened, drafted, sending, { type: "drafted", key: SESSION, text: "Hi!" }, ack]);
    expect(state.drafts).toEqual({ [SESSION]: "Hi!" });
  });

  const failures: [string, Action][] = [
    ["refused", { type: "frame", frame: { type: "error", re: "f1", data: failure } }],
    ["timed out", { type: "sendFailed", frameId: "f1", error: failure }],
  ];
  it.each(failures)("stays when its message was %s", (_name, action) => {
    const state = after([opened, drafted, sending, action]);
    expect(state.drafts).toEqual({ [SESSION]: "Hi" });
    expect(sendFailure(state)).toMatchObject({ code: "queue_full" });
    expect(isSending(state)).toBe(false);
  });

  it("of a new chat moves to the session made for it", () => {
    const typed: Action[] = [
      { type: "drafted", key: NEW_CHAT, text: "Hi" },
      { type: "drafted", key: NEW_SYSTEM_PROMPT, text: "Be brief" },
      { type: "sessionCreating" },
      { type: "sessionCreated", session: session("ses_9") },
    ];
    expect(after(typed).drafts).toEqual({ ses_9: "Hi" });
  });

  it("of a new chat stays when no session could be made", () => {
    const error = { code: "unreachable", message: "" };
    const state = after([
      { type: "drafted", key: NEW_CHAT, text: "Hi" },
      { type: "sessionCreateFailed", error },
    ]);
    expect(state.drafts).toEqual({ [NEW_CHAT]: "Hi" });
    expect(sendFailure(state)).toEqual(error);
  });
});

describe("stored messages beside live ones", () => {
  const load = (content: string, status: Message["status"]): Action => ({
    type: "messagesLoaded",
    session: SESSION,
    messages: [turn().message, message("msg_1b", { content, status, parent_id: "msg_1a" })],
  });
  const live = afterFrames([created, started, delta(2, 0, "Hello")]);

  it("a running answer that we follow is ahead of the database", () => {
    expect(answer(after([load("Hel", "streaming")], live))).toBe("Hello");
  });

  it("an answer that ended in the database is taken, and later deltas add nothing", () => {
    const state = after([load("Hello there", "complete")], live);
    expect(answer(afterFrames([delta(3, 5, " there"), done(4)], state))).toBe("Hello there");
  });

  it("an answer that ended here is not opened again by an older read", () => {
    const ended = afterFrames([done(3)], live);
    expect(after([load("Hel", "streaming")], ended).chats[SESSION]?.messages.at(-1)?.status).toBe("complete");
  });

  it("a turn that began after the read stays", () => {
    const state = after([{ type: "messagesLoaded", session: SESSION, messages: [message("msg_0b")] }], live);
    expect(state.chats[SESSION]?.messages.map((one) => one.id)).toEqual(["msg_0b", "msg_1a", "msg_1b"]);
  });

  it("a failed read keeps what is shown", () => {
    const shown = after([load("Hello", "complete"), { type: "messagesFailed", session: SESSION, missing: false }]);
    expect(shown.chats[SESSION]?.status).toBe("ready");
  });
});

describe("the list", () => {
  const day = (date: number) => `2026-01-${String(date).padStart(2, "0")}T00:00:00Z`;
  const item = (date: number) => session(`ses_${date}`, { updated_at: day(date) });
  const page = (dates: number[], next: string | null, append = false): Action => ({
    type: "listLoaded",
    page: { data: dates.map(item), has_more: next !== null, next },
    append,
  });
  const ids = (state: State) => state.list.items.map((one) => one.id.slice(4)).join(" ");

  const cases: [string, Action[], string, string | null][] = [
    ["one page", [page([9, 8], "c8")], "9 8", "c8"],
    ["the next page is added", [page([9, 8], "c8"), page([7, 6], "c6", true)], "9 8 7 6", "c6"],
    [
      "a refresh keeps later pages",
      [page([9, 8], "c8"), page([7, 6], null, true), page([10, 9], "c9")],
      "10 9 8 7 6",
      null,
    ],
    ["a refresh drops what was deleted", [page([9, 8, 7], null), page([9, 7], null)], "9 7", null],
  ];
  it.each(cases)("%s", (_name, actions, expected, next) => {
    const state = after(actions);
    expect(ids(state)).toBe(expected);
    expect(state.list.next).toBe(next);
  });
});

describe("why nothing can be sent", () => {
  const cases: [Partial<State>, string | null][] = [
    [{ connection: "open", server: "ready" }, null],
    [{ connection: "open", server: "unknown" }, null],
    [{ connection: "connecting", server: "unknown" }, "connecting"],
    [{ connection: "open", server: "loading" }, "loading"],
    [{ connection: "waiting", server: "loading" }, "loading"],
    [{ connection: "open", server: "storage_busy" }, "storage_busy"],
    [{ connection: "open", server: "draining" }, "draining"],
    [{ connection: "waiting", server: "ready" }, "unreachable"],
    [{ connection: "open", server: "unreachable" }, "unreachable"],
  ];
  it.each(cases)("%o: %s", (fields, blocked) => {
    expect(blockedBy({ ...initialState, ...fields })).toBe(blocked);
  });
});

describe("the notice of dropped messages", () => {
  const cut = { first_kept: "msg_2a", dropped_messages: 2, dropped_tokens: 90 };
  const messages = ["msg_1a", "msg_1b", "msg_2a", "msg_2b"].map((id, index) => ({
    ...message(id, { role: index % 2 ? "assistant" : "user" }),
    error: null,
  }));
  const chat = { status: "ready" as const, messages, trimmed: null, stale: false };
  const notice = { before: "msg_2a", droppedMessages: 2, droppedTokens: 90 };

  it("stands where the newest cut is", () => {
    expect(windowNotice({ ...chat, messages: [...messages, { ...message("msg_3a", { cut }), error: null }] })).toEqual(
      notice,
    );
  });

  it("comes from the running turn before a cut was read", () => {
    const trimmed = { generation: "gen_1", droppedMessages: 2, droppedTokens: 90 };
    expect(windowNotice({ ...chat, trimmed })).toEqual(notice);
  });

  it("is absent when nothing was dropped", () => {
    expect(windowNotice(chat)).toBeNull();
  });
});
