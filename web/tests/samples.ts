/** Records and frames as the server would send them. */
import type { DeltaFrame, DoneFrame, ServerFrame, StartedFrame } from "../src/wire/frames";
import type { Generation, Message, Session, Timings, Turn, Usage } from "../src/wire/types";
import { initialState, type State } from "../src/state/model";
import { reduce } from "../src/state/reduce";

export const SESSION = "ses_1";
export const GENERATION = "gen_1";

export const usage: Usage = {
  prompt_tokens: 1204,
  completion_tokens: 89,
  total_tokens: 1293,
  prompt_tokens_details: { cached_tokens: 1152 },
};
export const timings: Timings = {
  queue_ms: 1,
  prefill_ms: 40,
  decode_ms: 1000,
  ttft_ms: 43,
  total_ms: 1043,
  drafted_tokens: 0,
  accepted_tokens: 0,
};

export function session(id: string, fields: Partial<Session> = {}): Session {
  const at = "2026-01-01T10:00:00Z";
  return { id, title: null, system_prompt: null, created_at: at, updated_at: at, ...fields };
}

export function message(id: string, fields: Partial<Message> = {}): Message {
  return {
    id,
    session_id: SESSION,
    parent_id: null,
    role: "assistant",
    content: "",
    status: "complete",
    finish_reason: null,
    usage: null,
    timings: null,
    created_at: "2026-01-01T10:00:00Z",
    cut: null,
    ...fields,
  };
}

export function turn(number = 1, parent: string | null = null): Turn {
  const question = message(`msg_${number}a`, { role: "user", content: "Hi", parent_id: parent });
  const reply = message(`msg_${number}b`, { status: "streaming", parent_id: question.id });
  const generation: Generation = {
    id: `gen_${number}`,
    session_id: SESSION,
    message_id: reply.id,
    status: "queued",
  };
  return { message: question, reply, generation };
}

const logged = { session: SESSION, generation: GENERATION };

export const created: ServerFrame = { type: "message.created", session: SESSION, data: turn() };

export const started: StartedFrame = {
  ...logged,
  type: "generation.started",
  seq: 1,
  data: { message_id: "msg_1b", prompt_tokens: 10, cached_tokens: 0 },
};

export function delta(seq: number, offset: number, text: string, seq_from = seq): DeltaFrame {
  return { ...logged, type: "generation.delta", seq, seq_from, data: { text, offset } };
}

export function done(seq: number, status = "completed", finish_reason = "stop"): DoneFrame {
  return {
    ...logged,
    type: "generation.done",
    seq,
    data: { message_id: "msg_1b", status, finish_reason, usage, timings },
  };
}

export function snapshot(seq: number, content: string): ServerFrame {
  const reply = message("msg_1b", { content, status: "streaming", parent_id: "msg_1a" });
  return { ...logged, type: "snapshot", seq, data: { message: reply } };
}

export function afterFrames(frames: readonly ServerFrame[], state: State = initialState): State {
  return frames.reduce((current, frame) => reduce(current, { type: "frame", frame }), state);
}

export function answer(state: State): string | undefined {
  return state.chats[SESSION]?.messages.findLast((one) => one.role === "assistant")?.content;
}
