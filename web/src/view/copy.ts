/** The copy buttons of code blocks. */
import type { Attachment } from "svelte/attachments";
import { t } from "../strings";

const SHOWN_MS = 1500;

async function copyText(text: string): Promise<void> {
  if (window.isSecureContext) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  if (!copied) throw new Error("copy was refused");
}

/** One listener for all buttons below `root`, also those that a growing answer adds later. */
export const copyOnClick: Attachment<HTMLElement> = (root) => {
  const clicked = async (event: MouseEvent) => {
    const button = event.target instanceof Element ? event.target.closest<HTMLElement>("[data-copy]") : null;
    const code = button?.closest(".code")?.querySelector("code");
    if (!button || !code) return;
    try {
      await copyText(code.textContent);
      button.textContent = t.code.copied;
    } catch {
      button.textContent = t.code.copyFailed;
    }
    setTimeout(() => (button.textContent = t.code.copy), SHOWN_MS);
  };
  root.addEventListener("click", clicked);
  return () => root.removeEventListener("click", clicked);
};
