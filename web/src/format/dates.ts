/** Dates of the session list: near ones relative, far ones short. */
import { language, t } from "../strings";

const relative = new Intl.RelativeTimeFormat(language, { numeric: "auto", style: "short" });
const dayAndMonth = new Intl.DateTimeFormat(language, { day: "numeric", month: "short" });
const withYear = new Intl.DateTimeFormat(language, { day: "numeric", month: "short", year: "numeric" });
const exact = new Intl.DateTimeFormat(language, { dateStyle: "medium", timeStyle: "short" });

const MINUTE_MS = 60_000;
const HOUR_MS = 60 * MINUTE_MS;

function calendarDay(date: Date): number {
  return Date.UTC(date.getFullYear(), date.getMonth(), date.getDate()) / (24 * HOUR_MS);
}

export function relativeDate(iso: string, now: Date): string {
  const date = new Date(iso);
  const ago = now.getTime() - date.getTime();
  const days = calendarDay(now) - calendarDay(date);
  if (ago < MINUTE_MS) return t.dates.now;
  if (ago < HOUR_MS) return relative.format(-Math.floor(ago / MINUTE_MS), "minute");
  if (days === 0) return relative.format(-Math.floor(ago / HOUR_MS), "hour");
  if (days < 7) return relative.format(-days, "day");
  return (date.getFullYear() === now.getFullYear() ? dayAndMonth : withYear).format(date);
}

export function exactDate(iso: string): string {
  return exact.format(new Date(iso));
}
