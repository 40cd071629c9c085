/** Messages on their way. A draft goes only when the server has acknowledged exactly that text. */
import type { Failure, State } from "./model";
import { without } from "./record";

function sessionOf(state: State, frameId: string): string | undefined {
  return Object.entries(state.sends).find(([, send]) => send.frameId === frameId)?.[0];
}

export function acknowledgeSend(state: State, frameId: string): State {
  const session = sessionOf(state, frameId);
  if (session === undefined) return state;
  const sent = state.sends[session]?.text;
  const drafts = state.drafts[session] === sent ? without(state.drafts, session) : state.drafts;
  return { ...state, sends: without(state.sends, session), drafts };
}

export function failSend(state: State, frameId: string, error: Failure): State {
  const session = sessionOf(state, frameId);
  const send = session === undefined ? undefined : state.sends[session];
  if (session === undefined || send === undefined) return state;
  return { ...state, sends: { ...state.sends, [session]: { ...send, status: "failed", error } } };
}
