/** The line below an answer. */
import type { ChatMessage } from "../state/model";
import { t } from "../strings";
import type { Timings, Usage } from "../wire/types";
import { count, duration, rate } from "./numbers";

/** `prompt 1,204 (cached 1,152) · TTFT 43 ms · 88 tok/s`, as far as the server measured. */
export function answerStats(usage: Usage | null, timings: Timings | null): string {
  const parts: string[] = [];
  if (usage !== null)
    parts.push(t.answer.prompt(count(usage.prompt_tokens), count(usage.prompt_tokens_details.cached_tokens)));
  if (timings !== null && timings.ttft_ms !== null) parts.push(t.answer.ttft(duration(timings.ttft_ms)));
  const speed = usage && timings ? tokensPerSecond(usage.completion_tokens, timings.decode_ms) : null;
  if (speed !== null) parts.push(t.answer.speed(rate(speed)));
  return parts.join(" · ");
}

/** Decoding speed: tokens after the first one over the time from first to last. Null when there is no such time. */
export function tokensPerSecond(completionTokens: number, decodeMs: number): number | null {
  return completionTokens > 1 && decodeMs > 0 ? ((completionTokens - 1) * 1000) / decodeMs : null;
}

/** Why an answer ended, or null when it ended by itself or is still running. */
export function whyEnded(message: ChatMessage): string | null {
  switch (message.status) {
    case "streaming":
      return null;
    case "complete":
      return message.finish_reason === "length" ? t.answer.length : null;
    case "cancelled":
      return t.answer.cancelled;
    case "interrupted":
      return t.answer.interrupted;
    case "failed":
      return message.error ? t.answer.failedBecause(message.error) : t.answer.failed;
  }
}
