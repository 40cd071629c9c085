/** The side list: newest activity first, each session once. */
import type { Session, SessionPage } from "../wire/types";
import { emptyChat, type State } from "./model";
import { without } from "./record";

function sorted(items: Iterable<Session>): readonly Session[] {
  return Array.from(items).sort(
    (a, b) => Date.parse(b.updated_at) - Date.parse(a.updated_at) || (a.id < b.id ? 1 : -1),
  );
}

/** A page replaces the list within its own range. What was loaded beyond it stays, and so does the cursor of that. */
export function listLoaded(state: State, page: SessionPage, append: boolean): State {
  const fresh = new Set(page.data.map((session) => session.id));
  const end = page.data.at(-1);
  const beyond = (session: Session) => page.has_more && end !== undefined && isOlder(session, end);
  const kept = state.list.items.filter((session) => !fresh.has(session.id) && (append || beyond(session)));
  const next = append || kept.length === 0 ? page.next : state.list.next;
  return { ...state, list: { items: sorted([...page.data, ...kept]), next, status: "ready" } };
}

function isOlder(session: Session, other: Session): boolean {
  return Date.parse(session.updated_at) < Date.parse(other.updated_at);
}

export function upsertSession(state: State, session: Session): State {
  const others = state.list.items.filter((other) => other.id !== session.id);
  return { ...state, list: { ...state.list, items: sorted([session, ...others]) } };
}

/** Moves a session up when something happened in it at `at`. */
export function touchSession(state: State, id: string, at: string): State {
  const session = state.list.items.find((other) => other.id === id);
  if (session === undefined || Date.parse(session.updated_at) >= Date.parse(at)) return state;
  return upsertSession(state, { ...session, updated_at: at });
}

export function removeSession(state: State, id: string): State {
  const live = Object.fromEntries(Object.entries(state.live).filter(([, generation]) => generation.session !== id));
  const chats =
    state.open === id
      ? { ...state.chats, [id]: { ...emptyChat, status: "missing" as const } }
      : without(state.chats, id);
  return {
    ...state,
    live,
    chats,
    list: { ...state.list, items: state.list.items.filter((session) => session.id !== id) },
    sends: without(state.sends, id),
    drafts: without(state.drafts, id),
    unread: without(state.unread, id),
  };
}
