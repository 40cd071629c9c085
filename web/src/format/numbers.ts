/** Numbers as people read them, in the page's language. */
import { language } from "../strings";

const whole = new Intl.NumberFormat(language);
const oneDigit = new Intl.NumberFormat(language, { maximumFractionDigits: 1 });

export function count(value: number): string {
  return whole.format(value);
}

/** 43 ms, 1.2 s */
export function duration(ms: number): string {
  return ms < 1000 ? `${whole.format(Math.round(ms))} ms` : `${oneDigit.format(ms / 1000)} s`;
}

/** Per second: 88, 7.5 */
export function rate(perSecond: number): string {
  return perSecond >= 10 ? whole.format(Math.round(perSecond)) : oneDigit.format(perSecond);
}
