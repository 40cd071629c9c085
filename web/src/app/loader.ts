/** REST reads that become actions. None of them rejects: what fails is shown as state. */
import type { Action } from "../state/actions";
import type { Store } from "../state/store.svelte";
import { ApiError, rest } from "../wire/rest";

const PAGE_SIZE = 30;
/** No such chat, or an address that cannot be one. */
const MISSING = new Set([404, 422]);

export class Loader {
  constructor(private readonly store: Store) {}

  /** The first page of sessions, or the one behind the cursor `after`. */
  async sessions(after: string | null = null): Promise<void> {
    this.store.dispatch({ type: "listLoading" });
    try {
      const page = await rest.sessions(PAGE_SIZE, after);
      this.store.dispatch({ type: "listLoaded", page, append: after !== null });
    } catch {
      this.store.dispatch({ type: "listFailed" });
    }
  }

  /** The messages of a session, and its record where the list does not hold it. */
  async messages(session: string): Promise<void> {
    try {
      const listed = this.store.state.list.items.some((item) => item.id === session);
      const [messages, record] = await Promise.all([rest.messages(session), listed ? null : rest.session(session)]);
      const actions: Action[] = record === null ? [] : [{ type: "sessionLoaded", session: record }];
      this.store.dispatch(...actions, { type: "messagesLoaded", session, messages });
    } catch (error) {
      const missing = error instanceof ApiError && MISSING.has(error.status);
      this.store.dispatch({ type: "messagesFailed", session, missing });
    }
  }

  /** Model and limits, once. */
  async info(): Promise<void> {
    if (this.store.state.info !== null) return;
    try {
      this.store.dispatch({ type: "info", info: await rest.info() });
    } catch {
      return;
    }
  }
}
