/** Markdown -> one HTML string per top-level block. Raw HTML is text, links are http(s) or mailto, images are links. */
import MarkdownIt from "markdown-it";
import type { RendererRule } from "markdown-it";
import { t } from "../strings";

const LINK = /^(?:https?:\/\/|mailto:)/i;
const ALIGN = /text-align:\s*(left|center|right)/;

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: false });
const { escapeHtml } = markdown.utils;
markdown.validateLink = (url) => LINK.test(url.trim());
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });

const openLink: RendererRule = (tokens, index, options, _env, self) => {
  tokens[index]?.attrSet("rel", "noopener noreferrer");
  tokens[index]?.attrSet("target", "_blank");
  return self.renderToken(tokens, index, options);
};

/** Nothing is fetched for an answer: an image is a link that the reader may follow. */
const imageAsLink: RendererRule = (tokens, index) => {
  const token = tokens[index];
  const label = escapeHtml(t.markdown.image(token?.content ?? ""));
  const href = escapeHtml(String(token?.attrGet("src") ?? ""));
  return `<a class="image" href="${href}" rel="noopener noreferrer" target="_blank">${label}</a>`;
};

const codeBlock: RendererRule = (tokens, index) => {
  const token = tokens[index];
  const language = token?.info.trim().split(/\s+/)[0] || t.code.plain;
  return (
    `<div class="code"><div class="code-bar"><span>${escapeHtml(language)}</span>` +
    `<button type="button" data-copy="code">${t.code.copy}</button></div>` +
    `<pre><code>${escapeHtml(token?.content ?? "")}</code></pre></div>\n`
  );
};

/** Column alignment as a class, because style attributes are forbidden by the page's policy. */
const alignedCell: RendererRule = (tokens, index, options, _env, self) => {
  const token = tokens[index];
  const align = ALIGN.exec(String(token?.attrGet("style") ?? ""))?.[1];
  if (token && align) token.attrs = [["class", `align-${align}`]];
  return self.renderToken(tokens, index, options);
};

Object.assign(markdown.renderer.rules, {
  link_open: openLink,
  image: imageAsLink,
  fence: codeBlock,
  code_block: codeBlock,
  table_open: () => '<div class="table"><table>\n',
  table_close: () => "</table></div>\n",
  th_open: alignedCell,
  td_open: alignedCell,
} satisfies Record<string, RendererRule>);

export function renderBlocks(text: string): string[] {
  const env = {};
  const tokens = markdown.parse(text, env);
  const blocks: string[] = [];
  let start = 0;
  let depth = 0;
  tokens.forEach((token, index) => {
    depth += token.nesting;
    if (depth > 0) return;
    blocks.push(markdown.renderer.render(tokens.slice(start, index + 1), markdown.options, env));
    start = index + 1;
  });
  return blocks;
}
