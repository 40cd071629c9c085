/** Watches whether the server takes turns: often while it does not, seldom while it does. */
import type { Store } from "../state/store.svelte";
import { rest } from "../wire/rest";

const READY_POLL_MS = 20_000;
const NOT_READY_POLL_MS = 2_000;

export class Readiness {
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly store: Store,
    private readonly becameReady: () => void,
  ) {}

  async check(): Promise<void> {
    clearTimeout(this.#timer);
    const status = await rest.readiness();
    clearTimeout(this.#timer);
    const ready = status === "ready";
    this.#timer = setTimeout(() => void this.check(), ready ? READY_POLL_MS : NOT_READY_POLL_MS);
    const before = this.store.state.server;
    this.store.dispatch({ type: "server", status });
    if (ready && before !== "ready") this.becameReady();
  }
}
