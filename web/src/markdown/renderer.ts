import { renderBlocks } from "./blocks";
import { sanitize } from "./sanitize";

/** Renders a growing text: blocks that did not change since the last call are neither sanitized nor replaced again. */
export class GrowingMarkdown {
  #raw: string[] = [];
  #clean: string[] = [];

  /** Safe HTML, one string per top-level block. */
  render(text: string): readonly string[] {
    const raw = renderBlocks(text);
    this.#clean = raw.map((html, index) => (html === this.#raw[index] ? (this.#clean[index] ?? "") : sanitize(html)));
    this.#raw = raw;
    return this.#clean;
  }
}
