/** WebSocket frames of the subprotocol chat.v1. */
import type { Message, Session, Timings, Turn, Usage } from "./types";

export const SUBPROTOCOL = "chat.v1";

export interface ResumePoint {
  generation: string;
  last_seq: number;
}

export interface CreateMessage {
  content: string;
  client_msg_id: string;
}

export type ClientFrame =
  | { type: "hello"; resume: ResumePoint[] }
  | { type: "subscribe"; id: string; session: string }
  | { type: "unsubscribe"; session: string }
  | { type: "message.create"; id: string; session: string; data: CreateMessage }
  | { type: "generation.cancel"; generation: string }
  | { type: "ping" };

/** A logged event: `seq` counts from 1 per generation; merged deltas cover seq_from..seq. */
interface Logged {
  session: string;
  generation: string;
  seq: number;
  seq_from?: number;
}

export type StartedFrame = Logged & {
  type: "generation.started";
  data: { message_id: string; prompt_tokens: number; cached_tokens: number };
};
export type DeltaFrame = Logged & { type: "generation.delta"; data: { text: string; offset: number } };
export type DoneFrame = Logged & {
  type: "generation.done";
  data: {
    message_id: string;
    status: string;
    finish_reason: string | null;
    usage: Usage | null;
    timings: Timings | null;
  };
};
export type FailedFrame = Logged & {
  type: "generation.failed";
  data: { message_id: string; code: string; message: string };
};
export type LoggedFrame = StartedFrame | DeltaFrame | DoneFrame | FailedFrame;

export type SnapshotFrame = Logged & { type: "snapshot"; data: { message: Message } };
export type ProgressFrame = {
  type: "generation.progress";
  session: string;
  generation: string;
  data: { processed: number; total: number; cached: number };
};
export type TrimmedFrame = {
  type: "context.trimmed";
  session: string;
  generation: string;
  data: { dropped_messages: number; dropped_tokens: number };
};
export type ErrorFrame = { type: "error"; re?: string; data: { code: string; message: string; retryable: boolean } };

export type ServerFrame =
  | LoggedFrame
  | SnapshotFrame
  | ProgressFrame
  | TrimmedFrame
  | ErrorFrame
  | { type: "welcome"; data: { connection_id: string; heartbeat_ms: number } }
  | { type: "ack"; re: string | null; data?: Partial<Turn> }
  | { type: "message.created"; session: string; data: Turn }
  | { type: "session.updated"; session: string; data: Session }
  | { type: "session.deleted"; session: string }
  | { type: "resume.reset"; generation: string; data: { message: Message | null } }
  | { type: "pong" }
  | { type: "server.draining" };

/** The frame in `text`, or null when it is not JSON with a type. Types this page does not know pass and are ignored. */
export function parseFrame(text: unknown): ServerFrame | null {
  if (typeof text !== "string") return null;
  try {
    const frame: unknown = JSON.parse(text);
    const known = typeof frame === "object" && frame !== null && "type" in frame && typeof frame.type === "string";
    return known ? (frame as ServerFrame) : null;
  } catch {
    return null;
  }
}
