/** Light or dark: the system's choice until the user makes one, which is then remembered. */
import { readItem, writeItem } from "./storage";

const KEY = "chatd.theme";

export type Theme = "light" | "dark";

/** The theme in effect. */
export function currentTheme(): Theme {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

export function applyRememberedTheme(): void {
  const remembered = readItem(KEY);
  if (remembered === "light" || remembered === "dark") document.documentElement.dataset.theme = remembered;
}

export function toggleTheme(): Theme {
  const theme: Theme = currentTheme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  writeItem(KEY, theme);
  return theme;
}
