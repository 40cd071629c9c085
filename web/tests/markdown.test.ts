import { describe, expect, it } from "vitest";
import { renderBlocks } from "../src/markdown/blocks";
import { GrowingMarkdown } from "../src/markdown/renderer";
import { sanitize } from "../src/markdown/sanitize";

function page(text: string): HTMLElement {
  const root = document.createElement("div");
  root.innerHTML = new GrowingMarkdown().render(text).join("");
  return root;
}

describe("hostile text stays text", () => {
  it.each([
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    '<b onclick="alert(1)">b</b>',
    "<style>body{display:none}</style>",
    "<iframe src=x></iframe>",
    "<svg/onload=alert(1)>",
  ])("%s", (text) => {
    const root = page(text);
    expect(root.querySelectorAll("*:not(p)")).toHaveLength(0);
    expect(root.textContent.trim()).toBe(text);
  });

  it.each([
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](data:text/html,hi)",
    "[x](vbscript:x)",
    "[x](/relative)",
    "[x](file:///etc/passwd)",
    "![x](javascript:alert(1))",
    "![x](data:image/png;base64,AAAA)",
  ])("no link: %s", (text) => expect(page(text).querySelector("a, img")).toBeNull());
});

it("links open apart, without a handle back", () => {
  for (const text of ["[x](https://example.org/a)", "https://example.org/a", "<https://example.org/a>"]) {
    const link = page(text).querySelector("a");
    expect(link?.getAttribute("href")).toBe("https://example.org/a");
    expect(link?.rel).toBe("noopener noreferrer");
    expect(link?.target).toBe("_blank");
  }
  expect(page("[x](mailto:a@example.org)").querySelector("a")?.getAttribute("href")).toBe("mailto:a@example.org");
});

it("images are links and load nothing", () => {
  const root = page("![a <cat>](https://example.org/cat.png)");
  expect(root.querySelector("img")).toBeNull();
  expect(root.querySelector("a.image")?.textContent).toBe("Image: a <cat>");
});

it("code has its language, a copy button and its exact text", () => {
  const root = page("```python\nprint('<b>')\n```");
  expect(root.querySelector(".code-bar span")?.textContent).toBe("python");
  expect(root.querySelector("[data-copy]")?.textContent).toBe("Copy");
  expect(root.querySelector("code")?.textContent).toBe("print('<b>')\n");
  expect(page('```<img src=x>"\nx\n```').querySelector("img")).toBeNull();
});

it("tables align by class, never by a style attribute", () => {
  const root = page("| a | b |\n|--:|:-:|\n| 1 | 2 |");
  expect(root.innerHTML).not.toContain("style");
  expect([...root.querySelectorAll("td")].map((cell) => cell.className)).toEqual(["align-right", "align-center"]);
});

it("blocks are the top-level ones", () => {
  expect(renderBlocks("# T\n\ntext\n\n- a\n- b\n\n```\nx\n```")).toHaveLength(4);
  expect(renderBlocks("")).toEqual([]);
});

it("a growing text keeps its finished blocks", () => {
  const renderer = new GrowingMarkdown();
  const before = renderer.render("one\n\ntw");
  const after = renderer.render("one\n\ntwo *three*");
  expect(after[0]).toBe(before[0]);
  expect(after[1]).toBe("<p>two <em>three</em></p>\n");
});

it.each(["a", "**b", "```js\nlet x", "| a |\n|--", "[x](http", "- ", "$5 and $10"])(
  "unfinished markup renders: %s",
  (text) => {
    expect(page(text).textContent).not.toBe("");
  },
);

it("the sanitizer alone drops what the renderer would never write", () => {
  expect(sanitize('<p style="color:red" onclick="x()">a<script>x</script></p>')).toBe("<p>a</p>");
  expect(sanitize('<a href="javascript:x">a</a>')).toBe("<a>a</a>");
});
