/** What the user can do. Each intent becomes actions and effects; views call nothing else. */
import { NEW_SYSTEM_PROMPT, type Failure } from "../state/model";
import { blockedBy, draftKey, isSending, liveOf } from "../state/select";
import type { Store } from "../state/store.svelte";
import { ApiError, rest } from "../wire/rest";
import { saveDrafts } from "./drafts";
import { LiveLink } from "./liveLink";
import { Loader } from "./loader";
import { randomId } from "./randomId";
import { Readiness } from "./readiness";
import { hashOf, sessionInHash } from "./route";

const SEND_TIMEOUT_MS = 20_000;

export class Controller {
  readonly #load: Loader;
  readonly #link: LiveLink;
  readonly #readiness: Readiness;

  constructor(private readonly store: Store) {
    const url = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/api/v1/ws`;
    this.#load = new Loader(store);
    this.#link = new LiveLink(url, store, {
      subscribed: (session) => void this.#load.messages(session),
      welcomed: () => this.#refresh(),
      troubled: () => void this.#readiness.check(),
    });
    this.#readiness = new Readiness(store, () => {
      this.#link.connect();
      void this.#load.info();
    });
    store.subscribe((state, before) => saveDrafts(state.drafts, before.drafts));
  }

  start(): void {
    addEventListener("hashchange", () => this.#openFromAddress());
    addEventListener("online", () => this.#wake());
    addEventListener("focus", () => this.#wake());
    this.#openFromAddress();
    this.#link.connect();
    void this.#load.sessions();
    void this.#readiness.check();
  }

  open(session: string | null): void {
    const hash = hashOf(session);
    if (location.hash !== hash) history.pushState(null, "", hash);
    this.#openFromAddress();
  }

  async loadMoreSessions(): Promise<void> {
    const { next, status } = this.store.state.list;
    if (next !== null && status !== "loading") await this.#load.sessions(next);
  }

  retryList(): void {
    void this.#load.sessions();
  }

  retryChat(): void {
    const { open } = this.store.state;
    if (open !== null) void this.#load.messages(open);
  }

  draft(key: string, text: string): void {
    this.store.dispatch({ type: "drafted", key, text });
  }

  /** Sends the open chat's draft; for a new chat, makes the session first. */
  async send(): Promise<void> {
    const { state } = this.store;
    const text = state.drafts[draftKey(state)] ?? "";
    if (text.trim() === "" || blockedBy(state) !== null || isSending(state)) return;
    if (liveOf(state, state.open) !== null) return;
    const session = state.open ?? (await this.#createSession());
    if (session !== null) this.#sendMessage(session, text);
  }

  stop(): void {
    const live = liveOf(this.store.state, this.store.state.open);
    if (live !== null) this.#link.cancel(live.id);
  }

  /** Rejects with ApiError when the server did not delete it. */
  async deleteSession(session: string): Promise<void> {
    try {
      await rest.deleteSession(session);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) throw error;
    }
    if (this.store.state.open === session) this.open(null);
    this.store.dispatch({ type: "sessionDeleted", session });
  }

  #openFromAddress(): void {
    const session = sessionInHash(location.hash);
    this.store.dispatch({ type: "opened", session });
    if (session === null) return;
    /* With a connection, the new subscription loads the messages. */
    if (!this.#link.open && this.store.state.chats[session]?.status !== "ready") void this.#load.messages(session);
  }

  async #createSession(): Promise<string | null> {
    const systemPrompt = this.store.state.drafts[NEW_SYSTEM_PROMPT]?.trim() ?? "";
    this.store.dispatch({ type: "sessionCreating" });
    try {
      const session = await rest.createSession(systemPrompt === "" ? null : systemPrompt);
      const stayed = this.store.state.open === null;
      this.store.dispatch({ type: "sessionCreated", session });
      if (stayed) this.open(session.id);
      return session.id;
    } catch (error) {
      this.store.dispatch({ type: "sessionCreateFailed", error: failureOf(error) });
      void this.#readiness.check();
      return null;
    }
  }

  #sendMessage(session: string, text: string): void {
    const earlier = this.store.state.sends[session];
    const clientMsgId = earlier?.text === text ? earlier.clientMsgId : randomId();
    const frameId = randomId();
    this.store.dispatch({ type: "sending", session, frameId, clientMsgId, text });
    this.#link.submit(session);
    setTimeout(() => {
      const send = this.store.state.sends[session];
      if (send?.frameId !== frameId || send.status !== "pending") return;
      this.store.dispatch({ type: "sendFailed", frameId, error: { code: "timeout", message: "" } });
    }, SEND_TIMEOUT_MS);
  }

  #refresh(): void {
    void this.#load.sessions();
    void this.#readiness.check();
  }

  /** The tab or the line is back: do not wait for a timer. */
  #wake(): void {
    if (this.#link.open) this.#refresh();
    else this.#link.connect();
  }
}

function failureOf(error: unknown): Failure {
  return error instanceof ApiError
    ? { code: error.code, message: error.message }
    : { code: "unreachable", message: "" };
}
