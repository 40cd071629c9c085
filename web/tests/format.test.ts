import { describe, expect, it } from "vitest";
import { answerStats, tokensPerSecond, whyEnded } from "../src/format/answer";
import { relativeDate } from "../src/format/dates";
import { count, duration, rate } from "../src/format/numbers";
import { message, timings, usage } from "./samples";

it("the line below an answer", () => {
  expect(answerStats(usage, timings)).toBe("prompt 1,204 (cached 1,152) · TTFT 43 ms · 88 tok/s");
  expect(answerStats(usage, null)).toBe("prompt 1,204 (cached 1,152)");
  expect(answerStats({ ...usage, completion_tokens: 0 }, { ...timings, ttft_ms: null })).toBe(
    "prompt 1,204 (cached 1,152)",
  );
  expect(answerStats(null, null)).toBe("");
});

it.each([
  [89, 1000, 88],
  [1, 1000, null],
  [0, 0, null],
  [5, 0, null],
])("%d tokens in %d ms: %s per second", (tokens, ms, expected) => {
  expect(tokensPerSecond(tokens, ms)).toBe(expected);
});

it.each([
  ["complete", "stop", null],
  ["complete", "length", "Stopped at the length limit"],
  ["cancelled", "cancelled", "Stopped by you"],
  ["interrupted", null, "Interrupted because the server stopped"],
  ["failed", null, "Failed: out of pages"],
  ["streaming", null, null],
] as const)("%s, %s: %s", (status, finish_reason, expected) => {
  expect(whyEnded({ ...message("msg_1", { status, finish_reason }), error: "out of pages" })).toBe(expected);
});

it.each([
  [count(1204), "1,204"],
  [duration(43.4), "43 ms"],
  [duration(1234), "1.2 s"],
  [rate(88.4), "88"],
  [rate(7.46), "7.5"],
])("%s is %s", (actual, expected) => expect(actual).toBe(expected));

describe("relative dates", () => {
  const now = new Date(2026, 2, 10, 12, 0, 0);
  it.each([
    [new Date(2026, 2, 10, 11, 59, 40), "now"],
    [new Date(2026, 2, 10, 12, 0, 30), "now"],
    [new Date(2026, 2, 10, 11, 55), "5 min. ago"],
    [new Date(2026, 2, 10, 9, 0), "3 hr. ago"],
    [new Date(2026, 2, 9, 23, 0), "yesterday"],
    [new Date(2026, 2, 6, 9, 0), "4 days ago"],
    [new Date(2026, 0, 3), "Jan 3"],
    [new Date(2025, 11, 31), "Dec 31, 2025"],
  ])("%s: %s", (date, expected) => expect(relativeDate(date.toISOString(), now)).toBe(expected));
});
