/** State and one WebSocket frame -> state. A logged frame takes effect exactly once, in order, or marks its chat stale.
 *
 *   seq <= lastSeq                  seen: ignored
 *   seq_from <= lastSeq + 1 <= seq  applied; a delta that overlaps gives only its new code points
 *   seq_from > lastSeq + 1          a gap: the chat is stale until it is loaded again
 */
import type { DeltaFrame, DoneFrame, FailedFrame, LoggedFrame, ServerFrame, SnapshotFrame } from "../wire/frames";
import type { Message, MessageStatus, Session, Turn } from "../wire/types";
import { appendTurn, codePoints, dropCodePoints, upsert, withError } from "./messages";
import { emptyChat, type Chat, type ChatMessage, type Live, type State } from "./model";
import { without } from "./record";
import { acknowledgeSend, failSend } from "./sends";
import { removeSession, touchSession, upsertSession } from "./sessionList";

export function reduceFrame(state: State, frame: ServerFrame): State {
  switch (frame.type) {
    case "message.created":
      return turnCreated(state, frame.session, frame.data);
    case "generation.started":
    case "generation.delta":
    case "generation.done":
    case "generation.failed":
      return logged(state, frame);
    case "generation.progress":
      return updateLive(state, frame.generation, (live) => ({ ...live, phase: "prefill", progress: frame.data }));
    case "snapshot":
      return snapshot(state, frame);
    case "context.trimmed": {
      const { dropped_messages, dropped_tokens } = frame.data;
      const { generation, session } = frame;
      const trimmed = { generation, droppedMessages: dropped_messages, droppedTokens: dropped_tokens };
      return updateChat(state, session, (chat) => ({ ...chat, trimmed }));
    }
    case "session.updated":
      return upsertSession(state, frame.data as Session);
    case "session.deleted":
      return removeSession(state, frame.session);
    case "resume.reset":
      return resumeReset(state, frame.generation, frame.data.message);
    case "ack":
      return acknowledged(state, frame.re, frame.data);
    case "error":
      return frame.re === undefined ? state : failSend(state, frame.re, frame.data);
    case "server.draining":
      return { ...state, server: "draining" };
    default:
      return state;
  }
}

function acknowledged(state: State, re: string | null, data: Partial<Turn> | undefined): State {
  const next = re === null ? state : acknowledgeSend(state, re);
  const { message, reply, generation } = data ?? {};
  if (message === undefined || reply === undefined || generation === undefined) return next;
  return turnCreated(next, message.session_id, { message, reply, generation });
}

function turnCreated(state: State, session: string, turn: Turn): State {
  const touched = touchSession(state, session, turn.message.created_at);
  const next = updateChat(touched, session, (chat) => ({ ...chat, messages: appendTurn(chat.messages, turn) }));
  const { id } = turn.generation;
  if (turn.reply.status !== "streaming" || next.live[id] !== undefined) return next;
  if (messageOf(next, session, turn.reply.id)?.status !== "streaming") return next;
  const live: Live = {
    id,
    session,
    messageId: turn.reply.id,
    phase: "queued",
    lastSeq: 0,
    chars: 0,
    progress: null,
  };
  return { ...next, live: { ...next.live, [id]: live } };
}

function logged(state: State, frame: LoggedFrame): State {
  const live = state.live[frame.generation];
  if (live === undefined) return unfollowed(state, frame);
  if (frame.seq <= live.lastSeq) return state;
  if ((frame.seq_from ?? frame.seq) > live.lastSeq + 1) return markStale(state, live.session);
  switch (frame.type) {
    case "generation.started": {
      const { prompt_tokens: total, cached_tokens: cached } = frame.data;
      const progress = { processed: cached, total, cached };
      return setLive(state, { ...live, phase: "prefill", lastSeq: frame.seq, progress });
    }
    case "generation.delta":
      return delta(state, live, frame);
    case "generation.done":
    case "generation.failed":
      return ended(state, live, frame);
  }
}

/** A frame of a generation that we do not follow: news only where its message still waits for an end. */
function unfollowed(state: State, frame: LoggedFrame): State {
  const waiting = state.chats[frame.session]?.messages.some((message) => message.status === "streaming");
  return waiting ? markStale(state, frame.session) : state;
}

function delta(state: State, live: Live, frame: DeltaFrame): State {
  const { text, offset } = frame.data;
  const message = messageOf(state, live.session, live.messageId);
  if (message === undefined || offset > live.chars) return markStale(state, live.session);
  const added = offset === live.chars ? text : dropCodePoints(text, live.chars - offset);
  const chars = live.chars + codePoints(added);
  const next = setLive(state, { ...live, phase: "decode", lastSeq: frame.seq, chars, progress: null });
  const stored = message.status !== "streaming";
  return stored ? next : setMessage(next, { ...message, content: message.content + added });
}

function ended(state: State, live: Live, frame: DoneFrame | FailedFrame): State {
  const message = messageOf(state, live.session, live.messageId);
  const unread = state.open === live.session ? state.unread : { ...state.unread, [live.session]: true as const };
  const next = { ...state, live: without(state.live, live.id), unread };
  if (message === undefined) return next;
  if (frame.type === "generation.failed")
    return setMessage(next, { ...message, status: "failed", error: frame.data.message });
  const { status, finish_reason, usage, timings } = frame.data;
  return setMessage(next, { ...message, status: messageStatus(status), finish_reason, usage, timings });
}

function snapshot(state: State, frame: SnapshotFrame): State {
  const { message } = frame.data;
  const live = state.live[frame.generation];
  if (live !== undefined && live.lastSeq > frame.seq) return state;
  const next = putMessage(state, frame.session, message);
  if (message.status !== "streaming") return { ...next, live: without(next.live, frame.generation) };
  return setLive(next, {
    id: frame.generation,
    session: frame.session,
    messageId: message.id,
    phase: message.content === "" ? (live?.phase ?? "queued") : "decode",
    lastSeq: frame.seq,
    chars: codePoints(message.content),
    progress: live?.progress ?? null,
  });
}

function resumeReset(state: State, generation: string, message: Message | null): State {
  const session = message?.session_id ?? state.live[generation]?.session;
  const next = { ...state, live: without(state.live, generation) };
  if (session === undefined) return next;
  return message === null ? markStale(next, session) : putMessage(next, session, message);
}

/** Generations and messages name a normal end differently. */
function messageStatus(status: string): MessageStatus {
  return status === "completed" ? "complete" : (status as MessageStatus);
}

function messageOf(state: State, session: string, id: string): ChatMessage | undefined {
  return state.chats[session]?.messages.findLast((message) => message.id === id);
}

function setMessage(state: State, message: ChatMessage): State {
  return updateChat(state, message.session_id, (chat) => ({ ...chat, messages: upsert(chat.messages, message) }));
}

function putMessage(state: State, session: string, message: Message): State {
  return updateChat(state, session, (chat) => ({ ...chat, messages: upsert(chat.messages, withError(message)) }));
}

function updateChat(state: State, session: string, change: (chat: Chat) => Chat): State {
  return { ...state, chats: { ...state.chats, [session]: change(state.chats[session] ?? emptyChat) } };
}

function markStale(state: State, session: string): State {
  return updateChat(state, session, (chat) => ({ ...chat, stale: true }));
}

function setLive(state: State, live: Live): State {
  return { ...state, live: { ...state.live, [live.id]: live } };
}

function updateLive(state: State, generation: string, change: (live: Live) => Live): State {
  const live = state.live[generation];
  return live === undefined ? state : setLive(state, change(live));
}
