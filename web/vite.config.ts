import { svelte } from "@sveltejs/vite-plugin-svelte";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";

/** Holds the first paint until the script has applied a remembered theme, so that a dark page never flashes white. */
function renderBlockingEntry(): Plugin {
  return {
    name: "render-blocking-entry",
    transformIndexHtml: {
      order: "post",
      handler: (html) => html.replace('<script type="module"', '<script blocking="render" type="module"'),
    },
  };
}

const backend = process.env.CHATD_URL ?? "http://127.0.0.1:8000";

export default defineConfig({
  plugins: [svelte(), renderBlockingEntry()],
  build: { assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  server: {
    proxy: {
      "/api": { target: backend, ws: true },
      "/ready": backend,
    },
  },
  test: { include: ["tests/**/*.test.ts"], environment: "jsdom" },
});
