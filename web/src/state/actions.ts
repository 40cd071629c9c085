import type { ServerFrame } from "../wire/frames";
import type { Info, Message, Session, SessionPage } from "../wire/types";
import type { Connection, Failure, ServerStatus } from "./model";

export type Action =
  | { type: "frame"; frame: ServerFrame }
  | { type: "connection"; status: Connection }
  | { type: "server"; status: ServerStatus }
  | { type: "info"; info: Info }
  | { type: "opened"; session: string | null }
  | { type: "listLoaded"; page: SessionPage; append: boolean }
  | { type: "listLoading" }
  | { type: "listFailed" }
  | { type: "sessionLoaded"; session: Session }
  | { type: "sessionCreating" }
  | { type: "sessionCreated"; session: Session }
  | { type: "sessionCreateFailed"; error: Failure }
  | { type: "sessionDeleted"; session: string }
  | { type: "messagesLoaded"; session: string; messages: readonly Message[] }
  | { type: "messagesFailed"; session: string; missing: boolean }
  | { type: "chatStale"; session: string }
  | { type: "chatRefreshing"; session: string }
  | { type: "drafted"; key: string; text: string }
  | { type: "sending"; session: string; frameId: string; clientMsgId: string; text: string }
  | { type: "sendFailed"; frameId: string; error: Failure };
