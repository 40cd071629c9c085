/** Records as the server sends them. Times are RFC 3339 UTC, durations milliseconds, counts tokens. */

export type MessageStatus = "complete" | "streaming" | "interrupted" | "cancelled" | "failed";
export type GenerationStatus = "queued" | "running" | "completed" | "cancelled" | "interrupted" | "failed";

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}

export interface Timings {
  queue_ms: number;
  prefill_ms: number;
  decode_ms: number;
  ttft_ms: number | null;
  total_ms: number;
  /** Guessed by speculation, and how many of them were kept. */
  drafted_tokens: number;
  accepted_tokens: number;
}

/** Where the window starts: messages before `first_kept` are no longer sent to the model. */
export interface ContextCut {
  first_kept: string;
  dropped_messages: number;
  dropped_tokens: number;
}

export interface Session {
  id: string;
  title: string | null;
  system_prompt: string | null;
  created_at: string;
  updated_at: string;
}

export interface Message {
  id: string;
  session_id: string;
  parent_id: string | null;
  role: "system" | "user" | "assistant";
  content: string;
  status: MessageStatus;
  finish_reason: string | null;
  usage: Usage | null;
  timings: Timings | null;
  created_at: string;
  cut: ContextCut | null;
}

export interface Generation {
  id: string;
  session_id: string;
  message_id: string;
  status: GenerationStatus;
}

/** One exchange: the user's message, the answer's placeholder and the generation that fills it. */
export interface Turn {
  message: Message;
  reply: Message;
  generation: Generation;
}

export interface SessionPage {
  data: Session[];
  has_more: boolean;
  next: string | null;
}

export interface Info {
  model: string;
  context_length: number;
  version: string;
  limits: { max_message_bytes: number };
}
