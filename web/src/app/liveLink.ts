/** The socket and what the page follows through it: frames become actions once per animation frame. */
import type { Action } from "../state/actions";
import { resumePoints, staleSessions, wantedSessions } from "../state/resume";
import type { Store } from "../state/store.svelte";
import type { ServerFrame } from "../wire/frames";
import { ChatSocket, type SocketStatus } from "../wire/socket";
import { FrameBatch } from "./batch";
import { randomId } from "./randomId";

export interface LiveLinkHandlers {
  /** Subscribed from now on: what is read of `session` after this is whole. */
  subscribed(session: string): void;
  /** A new connection; things may have happened since the last one. */
  welcomed(): void;
  /** The line was lost, or the server refused a request. */
  troubled(): void;
}

export class LiveLink {
  readonly #socket: ChatSocket;
  readonly #frames = new FrameBatch<ServerFrame>((frames) => this.#receive(frames));
  /** Sessions subscribed to on this connection, and the subscribe frames that wait for their ack. */
  readonly #subscribed = new Set<string>();
  readonly #subscribing = new Map<string, string>();
  /** Generations to be stopped, until they have ended: a stop is sent again where the line was lost. */
  readonly #stopping = new Set<string>();

  constructor(
    url: string,
    private readonly store: Store,
    private readonly handlers: LiveLinkHandlers,
  ) {
    this.#socket = new ChatSocket(url, {
      hello: () => ({ type: "hello", resume: resumePoints(store.state) }),
      onFrame: (frame) => this.#frames.add(frame),
      onStatus: (status) => this.#statusChanged(status),
    });
    store.subscribe((state, before) => {
      if (state.open !== before.open || state.live !== before.live) this.#syncSubscriptions();
    });
  }

  connect(): void {
    this.#socket.connect();
  }

  get open(): boolean {
    return this.store.state.connection === "open";
  }

  /** Sends the session's pending message; without a connection it goes out at the next welcome. */
  submit(session: string): void {
    const send = this.store.state.sends[session];
    if (send?.status !== "pending") return;
    const data = { content: send.text, client_msg_id: send.clientMsgId };
    this.#socket.send({ type: "message.create", id: send.frameId, session, data });
  }

  cancel(generation: string): void {
    this.#stopping.add(generation);
    this.#socket.send({ type: "generation.cancel", generation });
  }

  #statusChanged(status: SocketStatus): void {
    this.store.dispatch({ type: "connection", status });
    if (status === "waiting") this.handlers.troubled();
  }

  #receive(frames: readonly ServerFrame[]): void {
    this.store.dispatch(...frames.map((frame): Action => ({ type: "frame", frame })));
    for (const frame of frames) {
      if (frame.type === "welcome") this.#welcomed();
      else if (frame.type === "generation.done" || frame.type === "generation.failed") {
        this.#stopping.delete(frame.generation);
      } else if (frame.type === "ack" && frame.re !== null) this.#answered(frame.re);
      else if (frame.type === "error" && frame.re !== undefined) {
        this.#answered(frame.re);
        this.handlers.troubled();
      }
    }
    for (const session of staleSessions(this.store.state)) this.#resubscribe(session);
  }

  #welcomed(): void {
    this.#subscribed.clear();
    this.#subscribing.clear();
    this.#syncSubscriptions();
    for (const session of Object.keys(this.store.state.sends)) this.submit(session);
    for (const generation of this.#stopping) this.cancel(generation);
    this.handlers.welcomed();
  }

  #syncSubscriptions(): void {
    if (!this.open) return;
    const wanted = wantedSessions(this.store.state);
    for (const session of this.#subscribed) if (!wanted.has(session)) this.#unsubscribe(session);
    for (const session of wanted) if (!this.#subscribed.has(session)) this.#subscribe(session);
  }

  #subscribe(session: string): void {
    const id = randomId();
    this.#subscribed.add(session);
    this.#subscribing.set(id, session);
    this.#socket.send({ type: "subscribe", id, session });
  }

  #unsubscribe(session: string): void {
    this.#subscribed.delete(session);
    this.#socket.send({ type: "unsubscribe", session });
  }

  #resubscribe(session: string): void {
    this.store.dispatch({ type: "chatRefreshing", session });
    if (!this.open) return;
    this.#unsubscribe(session);
    this.#subscribe(session);
  }

  /** An ack or an error; a refused subscription is read as well, which tells why. */
  #answered(frameId: string): void {
    const session = this.#subscribing.get(frameId);
    this.#subscribing.delete(frameId);
    if (session !== undefined) this.handlers.subscribed(session);
  }
}
