const FIRST_MS = 500;
const LONGEST_MS = 15_000;

/** Milliseconds before reconnect number `attempt` (from 0): doubling, capped, the upper half of it random. */
export function backoffMs(attempt: number, random: () => number = Math.random): number {
  const full = Math.min(LONGEST_MS, FIRST_MS * 2 ** attempt);
  return full / 2 + (full / 2) * random();
}
