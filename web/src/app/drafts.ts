/** Unsent texts, one localStorage entry per chat, so that tabs do not overwrite each other's. */
import { keysWith, readItem, writeItem } from "./storage";

const PREFIX = "chatd.draft.";

export type Drafts = Readonly<Record<string, string>>;

export function loadDrafts(): Drafts {
  return Object.fromEntries(keysWith(PREFIX).map((key) => [key.slice(PREFIX.length), readItem(key) ?? ""]));
}

/** Writes what changed between two states. */
export function saveDrafts(drafts: Drafts, before: Drafts): void {
  if (drafts === before) return;
  for (const key of new Set([...Object.keys(drafts), ...Object.keys(before)])) {
    if (drafts[key] !== before[key]) writeItem(PREFIX + key, drafts[key] ?? null);
  }
}
