/** What may replace what in a list of messages. */
import type { Message, Turn } from "../wire/types";
import type { ChatMessage, Live } from "./model";

export function withError(message: Message, error: string | null = null): ChatMessage {
  return { ...message, error };
}

/** `incoming` beside what is shown: a running answer that we follow live is ahead of the database, all else is not. */
function newer(shown: ChatMessage | undefined, incoming: Message, followed: boolean): ChatMessage {
  if (shown === undefined) return withError(incoming);
  if (incoming.status === "streaming" && (followed || shown.status !== "streaming")) return shown;
  return withError(incoming, incoming.status === "failed" ? shown.error : null);
}

/** The stored path merged with what arrived since it was read: messages newer than its last one stay. */
export function mergeLoaded(
  shown: readonly ChatMessage[],
  loaded: readonly Message[],
  live: Readonly<Record<string, Live>>,
): readonly ChatMessage[] {
  const followed = new Set(Object.values(live).map((generation) => generation.messageId));
  const byId = new Map(shown.map((message) => [message.id, message]));
  const merged = loaded.map((message) => newer(byId.get(message.id), message, followed.has(message.id)));
  const last = loaded.at(-1)?.id ?? "";
  return [...merged, ...shown.filter((message) => message.id > last)];
}

/** Replaces the message of the same id, or adds it at the end. */
export function upsert(shown: readonly ChatMessage[], message: ChatMessage): readonly ChatMessage[] {
  const index = shown.findLastIndex((other) => other.id === message.id);
  return index < 0 ? [...shown, message] : shown.with(index, message);
}

/** The path that ends in `turn`: it hangs below its parent, and what was shown after the parent is another branch. */
export function appendTurn(shown: readonly ChatMessage[], turn: Turn): readonly ChatMessage[] {
  if (shown.some((message) => message.id === turn.reply.id)) return shown;
  const parent = turn.message.parent_id;
  const at = parent === null ? -1 : shown.findLastIndex((message) => message.id === parent);
  const kept = parent !== null && at < 0 ? shown : shown.slice(0, at + 1);
  return [...kept, withError(turn.message), withError(turn.reply)];
}

export function codePoints(text: string): number {
  let count = 0;
  for (const _ of text) count += 1;
  return count;
}

/** `text` without its first `count` code points. */
export function dropCodePoints(text: string, count: number): string {
  return Array.from(text).slice(count).join("");
}
