/** Everything the page shows. Immutable: the reducer makes a new state, unchanged parts keep their identity. */
import type { Readiness } from "../wire/rest";
import type { Info, Message, Session } from "../wire/types";

/** A message and, once its generation failed under our eyes, why. */
export interface ChatMessage extends Message {
  error: string | null;
}

export interface Progress {
  processed: number;
  total: number;
  cached: number;
}

/** A generation that has not ended yet. lastSeq and chars (code points) say how much of its log the message holds. */
export interface Live {
  id: string;
  session: string;
  messageId: string;
  phase: "queued" | "prefill" | "decode";
  lastSeq: number;
  chars: number;
  progress: Progress | null;
}

export interface Trimmed {
  generation: string;
  droppedMessages: number;
  droppedTokens: number;
}

export interface Chat {
  status: "loading" | "ready" | "missing" | "failed";
  messages: readonly ChatMessage[];
  trimmed: Trimmed | null;
  /** Something was missed: subscribe and load anew. */
  stale: boolean;
}

/** A message on its way. The same clientMsgId goes out again after a reconnect or retry, so that it is one turn. */
export interface Send {
  frameId: string;
  clientMsgId: string;
  text: string;
  status: "pending" | "failed";
  error: Failure | null;
}

export interface Failure {
  code: string;
  message: string;
}

export interface SessionList {
  items: readonly Session[];
  next: string | null;
  status: "loading" | "ready" | "failed";
}

export type ServerStatus = "unknown" | Readiness;
export type Connection = "connecting" | "open" | "waiting";

export interface State {
  /** The open chat; null is a new one. */
  open: string | null;
  connection: Connection;
  server: ServerStatus;
  info: Info | null;
  list: SessionList;
  chats: Readonly<Record<string, Chat>>;
  live: Readonly<Record<string, Live>>;
  sends: Readonly<Record<string, Send>>;
  drafts: Readonly<Record<string, string>>;
  /** Sessions whose answer ended while another chat was open. */
  unread: Readonly<Record<string, true>>;
  creating: { status: "idle" | "pending" | "failed"; error: Failure | null };
}

/** Draft keys of the chat that does not exist yet. */
export const NEW_CHAT = "new";
export const NEW_SYSTEM_PROMPT = "new:system";

export const initialState: State = {
  open: null,
  connection: "connecting",
  server: "unknown",
  info: null,
  list: { items: [], next: null, status: "loading" },
  chats: {},
  live: {},
  sends: {},
  drafts: {},
  unread: {},
  creating: { status: "idle", error: null },
};

export const emptyChat: Chat = { status: "loading", messages: [], trimmed: null, stale: false };
