/** The page's language. Another one is another module of the same type and one more line in `languages`. */
import { en } from "./en";

export type Strings = typeof en;

const languages: Record<string, Strings> = { en };

function pick(wanted: readonly string[]): string {
  return wanted.map((tag) => tag.split("-")[0] ?? "").find((tag) => tag in languages) ?? "en";
}

export const language: string = pick(navigator.languages);
export const t: Strings = languages[language] ?? en;
