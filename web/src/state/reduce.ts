/** State and action -> state. Pure; the only place where state is made. */
import type { Action } from "./actions";
import { mergeLoaded } from "./messages";
import { emptyChat, NEW_CHAT, NEW_SYSTEM_PROMPT, type Chat, type State } from "./model";
import { without } from "./record";
import { reduceFrame } from "./reduceFrame";
import { failSend } from "./sends";
import { listLoaded, removeSession, upsertSession } from "./sessionList";

export function reduce(state: State, action: Action): State {
  switch (action.type) {
    case "frame":
      return reduceFrame(state, action.frame);
    case "connection":
      return { ...state, connection: action.status };
    case "server":
      return state.server === action.status ? state : { ...state, server: action.status };
    case "info":
      return { ...state, info: action.info };
    case "opened":
      return opened(state, action.session);
    case "listLoaded":
      return listLoaded(state, action.page, action.append);
    case "listLoading":
      return { ...state, list: { ...state.list, status: "loading" } };
    case "listFailed":
      return { ...state, list: { ...state.list, status: "failed" } };
    case "sessionLoaded":
      return upsertSession(state, action.session);
    case "sessionCreating":
      return { ...state, creating: { status: "pending", error: null } };
    case "sessionCreateFailed":
      return { ...state, creating: { status: "failed", error: action.error } };
    case "sessionCreated":
      return sessionCreated(state, action.session.id, upsertSession(state, action.session));
    case "sessionDeleted":
      return removeSession(state, action.session);
    case "messagesLoaded":
      return patchChat(state, action.session, (chat) => ({
        ...chat,
        status: "ready",
        messages: mergeLoaded(chat.messages, action.messages, state.live),
      }));
    case "messagesFailed":
      return patchChat(state, action.session, (chat) => ({
        ...chat,
        status: action.missing ? "missing" : chat.status === "ready" ? "ready" : "failed",
      }));
    case "chatStale":
      return patchChat(state, action.session, (chat) => ({ ...chat, stale: true }));
    case "chatRefreshing":
      return patchChat(state, action.session, (chat) => ({ ...chat, stale: false }));
    case "drafted":
      return drafted(state, action.key, action.text);
    case "sending": {
      const { session, frameId, clientMsgId, text } = action;
      const send = { frameId, clientMsgId, text, status: "pending" as const, error: null };
      return { ...state, sends: { ...state.sends, [session]: send } };
    }
    case "sendFailed":
      return failSend(state, action.frameId, action.error);
  }
}

function opened(state: State, session: string | null): State {
  if (session === null) return { ...state, open: null };
  const chat = state.chats[session] ?? emptyChat;
  return {
    ...state,
    open: session,
    chats: { ...state.chats, [session]: chat },
    unread: without(state.unread, session),
  };
}

/** What was typed for the new chat now belongs to the session that was made for it. */
function sessionCreated(before: State, id: string, state: State): State {
  const text = before.drafts[NEW_CHAT] ?? "";
  const drafts = without(without(state.drafts, NEW_CHAT), NEW_SYSTEM_PROMPT);
  return {
    ...state,
    drafts: text === "" ? drafts : { ...drafts, [id]: text },
    chats: { ...state.chats, [id]: { ...emptyChat, status: "ready" } },
    creating: { status: "idle", error: null },
  };
}

function drafted(state: State, key: string, text: string): State {
  const drafts = text === "" ? without(state.drafts, key) : { ...state.drafts, [key]: text };
  return { ...state, drafts };
}

function patchChat(state: State, session: string, change: (chat: Chat) => Chat): State {
  return { ...state, chats: { ...state.chats, [session]: change(state.chats[session] ?? emptyChat) } };
}
