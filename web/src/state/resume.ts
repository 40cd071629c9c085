import type { ResumePoint } from "../wire/frames";
import type { State } from "./model";

/** Where each followed generation goes on after a lost connection. */
export function resumePoints(state: State): ResumePoint[] {
  return Object.values(state.live).map(({ id, lastSeq }) => ({ generation: id, last_seq: lastSeq }));
}

/** Sessions to be subscribed to: the open one, and those whose answer is still running. */
export function wantedSessions(state: State): Set<string> {
  const wanted = new Set(Object.values(state.live).map((live) => live.session));
  if (state.open !== null && state.chats[state.open]?.status !== "missing") wanted.add(state.open);
  return wanted;
}

export function staleSessions(state: State): string[] {
  return Object.keys(state.chats).filter((session) => state.chats[session]?.stale);
}
