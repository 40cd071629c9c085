/** Questions that several views ask of the state. */
import { NEW_CHAT, type Chat, type ChatMessage, type Failure, type Live, type ServerStatus, type State } from "./model";

export function draftKey(state: State): string {
  return state.open ?? NEW_CHAT;
}

export function openChat(state: State): Chat | null {
  return state.open === null ? null : (state.chats[state.open] ?? null);
}

/** The running generation of a session, if any. */
export function liveOf(state: State, session: string | null): Live | null {
  if (session === null) return null;
  return Object.values(state.live).find((live) => live.session === session) ?? null;
}

export type Blocked = "connecting" | Exclude<ServerStatus, "unknown" | "ready">;

/** Why nothing can be sent now, or null. */
export function blockedBy(state: State): Blocked | null {
  const { server, connection } = state;
  if (server !== "ready" && server !== "unknown") return server;
  if (connection === "open") return null;
  return connection === "connecting" && server === "unknown" ? "connecting" : "unreachable";
}

/** Why the last send of the open chat failed, or null. */
export function sendFailure(state: State): Failure | null {
  if (state.open === null) return state.creating.error;
  return state.sends[state.open]?.error ?? null;
}

/** Whether the open chat's text is on its way right now. */
export function isSending(state: State): boolean {
  if (state.open === null) return state.creating.status === "pending";
  return state.sends[state.open]?.status === "pending";
}

export interface WindowNotice {
  /** The first message that is still sent to the model. */
  before: string;
  droppedMessages: number;
  droppedTokens: number;
}

/** Where earlier messages stopped being sent, from the newest cut on the path or the notice of the running turn. */
export function windowNotice(chat: Chat): WindowNotice | null {
  const { messages, trimmed } = chat;
  const cut = messages.findLast((message) => message.cut !== null)?.cut ?? null;
  if (cut !== null)
    return { before: cut.first_kept, droppedMessages: cut.dropped_messages, droppedTokens: cut.dropped_tokens };
  const lastQuestion = messages.findLast((message) => message.role === "user");
  if (trimmed === null || lastQuestion === undefined) return null;
  const { droppedMessages, droppedTokens } = trimmed;
  return { before: firstKept(messages, droppedMessages) ?? lastQuestion.id, droppedMessages, droppedTokens };
}

function firstKept(messages: readonly ChatMessage[], dropped: number): string | undefined {
  return messages.filter((message) => message.role !== "system")[dropped]?.id;
}
