import { describe, expect, it } from "vitest";
import { initialState } from "../src/state/model";
import { reduce } from "../src/state/reduce";
import { resumePoints, staleSessions, wantedSessions } from "../src/state/resume";
import type { ServerFrame } from "../src/wire/frames";
import {
  afterFrames,
  answer,
  created,
  delta,
  done,
  GENERATION,
  message,
  SESSION,
  session,
  snapshot,
  started,
  turn,
  usage,
} from "./samples";

const hello = [created, started, delta(2, 0, "Hel"), delta(3, 3, "lo")];

describe("text of a running answer", () => {
  const cases: [string, ServerFrame[], string][] = [
    ["in order", hello, "Hello"],
    ["a repeated delta", [...hello, delta(3, 3, "lo")], "Hello"],
    ["a replay from the start", [...hello, ...hello], "Hello"],
    ["merged deltas", [created, started, delta(4, 0, "Hello", 2)], "Hello"],
    ["merged deltas that overlap what is shown", [...hello, delta(4, 3, "lo there", 3)], "Hello there"],
    ["offsets count code points", [created, started, delta(2, 0, "a😀"), delta(3, 2, "b")], "a😀b"],
    ["an overlap cut inside code points", [created, started, delta(2, 0, "a😀"), delta(3, 1, "😀b", 2)], "a😀b"],
    ["a snapshot replaces", [created, started, snapshot(7, "Hello you"), delta(8, 9, "!")], "Hello you!"],
    ["an older snapshot changes nothing", [...hello, snapshot(2, "Hel")], "Hello"],
    ["a snapshot without anything before", [snapshot(7, "Hello"), delta(8, 5, "!")], "Hello!"],
    ["created twice (ack and event)", [...hello, created], "Hello"],
    ["frames after the end", [...hello, done(4), delta(5, 5, "?"), delta(3, 3, "lo")], "Hello"],
  ];
  it.each(cases)("%s", (_name, frames, text) => {
    const state = afterFrames(frames);
    expect(answer(state)).toBe(text);
    expect(staleSessions(state)).toEqual([]);
  });
});

describe("what was missed makes the chat stale", () => {
  const cases: [string, ServerFrame[]][] = [
    ["a gap in seq", [...hello, delta(5, 6, "!")]],
    ["a gap in the text", [...hello, delta(4, 9, "!")]],
    ["an end after a gap", [...hello, done(9)]],
    ["an unknown generation while a message waits", [snapshot(3, "Hi"), { ...done(9), generation: "gen_0" }]],
    [
      "a reset without a message",
      [...hello, { type: "resume.reset", generation: GENERATION, data: { message: null } }],
    ],
  ];
  it.each(cases)("%s", (_name, frames) => {
    expect(staleSessions(afterFrames(frames))).toEqual([SESSION]);
  });

  it("not a foreign generation in a chat at rest", () => {
    expect(staleSessions(afterFrames([...hello, done(4), { ...done(9), generation: "gen_0" }]))).toEqual([]);
  });
});

describe("the end", () => {
  const cases: [string, ServerFrame, string, string | null][] = [
    ["completed", done(4), "complete", null],
    ["cancelled", done(4, "cancelled", "cancelled"), "cancelled", null],
    ["interrupted", done(4, "interrupted", "interrupted"), "interrupted", null],
    [
      "failed",
      {
        type: "generation.failed",
        session: SESSION,
        generation: GENERATION,
        seq: 4,
        data: { message_id: "msg_1b", code: "x", message: "out of pages" },
      },
      "failed",
      "out of pages",
    ],
  ];
  it.each(cases)("%s", (_name, frame, status, error) => {
    const state = afterFrames([...hello, frame]);
    expect(state.chats[SESSION]?.messages.at(-1)).toMatchObject({ status, error, content: "Hello" });
    expect(state.live).toEqual({});
  });

  it("keeps usage and timings", () => {
    expect(afterFrames([...hello, done(4)]).chats[SESSION]?.messages.at(-1)?.usage).toEqual(usage);
  });

  it("marks a chat unread that is not open", () => {
    expect(afterFrames([...hello, done(4)]).unread).toEqual({ [SESSION]: true });
    const open = reduce(initialState, { type: "opened", session: SESSION });
    expect(afterFrames([...hello, done(4)], open).unread).toEqual({});
  });
});

describe("resume", () => {
  it("goes on after the last sequence number of each running generation", () => {
    expect(resumePoints(afterFrames(hello))).toEqual([{ generation: GENERATION, last_seq: 3 }]);
    expect(resumePoints(afterFrames([...hello, done(4)]))).toEqual([]);
  });

  it("follows the open chat and those that are answering", () => {
    const state = reduce(afterFrames(hello), { type: "opened", session: "ses_2" });
    expect(wantedSessions(state)).toEqual(new Set([SESSION, "ses_2"]));
  });

  it("takes the stored message when the log is gone", () => {
    const stored = message("msg_1b", { content: "Hello there", parent_id: "msg_1a" });
    const reset: ServerFrame = { type: "resume.reset", generation: GENERATION, data: { message: stored } };
    const state = afterFrames([...hello, reset]);
    expect(answer(state)).toBe("Hello there");
    expect(state.live).toEqual({});
  });
});

describe("turns and sessions", () => {
  it("a turn below an earlier message replaces the branch after it", () => {
    const two = { type: "message.created" as const, session: SESSION, data: turn(2, "msg_1b") };
    const fork = { type: "message.created" as const, session: SESSION, data: turn(3, "msg_1b") };
    const ids = afterFrames([created, two, fork]).chats[SESSION]?.messages.map((one) => one.id);
    expect(ids).toEqual(["msg_1a", "msg_1b", "msg_3a", "msg_3b"]);
  });

  it("progress and trimming are shown with their turn", () => {
    const progress = { processed: 5, total: 10, cached: 0 };
    const state = afterFrames([
      created,
      { type: "generation.progress", session: SESSION, generation: GENERATION, data: progress },
      {
        type: "context.trimmed",
        session: SESSION,
        generation: GENERATION,
        data: { dropped_messages: 2, dropped_tokens: 90 },
      },
    ]);
    expect(state.live[GENERATION]).toMatchObject({ phase: "prefill", progress });
    expect(state.chats[SESSION]?.trimmed).toMatchObject({ droppedMessages: 2, droppedTokens: 90 });
  });

  it("an updated session moves to the top", () => {
    const page = { data: [session("ses_2"), session("ses_1")], has_more: false, next: null };
    const listed = reduce(initialState, { type: "listLoaded", page, append: false });
    const data = session("ses_1", { title: "Rainbows", updated_at: "2026-01-02T00:00:00Z" });
    const state = afterFrames([{ type: "session.updated", session: "ses_1", data }], listed);
    expect(state.list.items.map((item) => item.title)).toEqual(["Rainbows", null]);
  });

  it("a deleted session takes everything of it along, and nothing comes back", () => {
    const open = reduce(afterFrames(hello), { type: "opened", session: SESSION });
    const state = afterFrames([{ type: "session.deleted", session: SESSION }, delta(4, 5, "!"), done(5)], open);
    expect(state.chats[SESSION]).toMatchObject({ status: "missing", messages: [] });
    expect(wantedSessions(state)).toEqual(new Set());
    expect(state.live).toEqual({});
  });

  it.each(["pong", "something.new"])("%s changes nothing", (type) => {
    expect(afterFrames([{ type } as ServerFrame])).toBe(initialState);
  });
});
