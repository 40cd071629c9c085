/** One WebSocket that reconnects by itself.
 *
 *   connecting ── welcome ──> open ── close, error, silence ──> waiting ── backoff ──> connecting
 */
import { backoffMs } from "./backoff";
import { parseFrame, SUBPROTOCOL, type ClientFrame, type ServerFrame } from "./frames";

export type SocketStatus = "connecting" | "open" | "waiting";

export interface SocketHandlers {
  /** The first frame of each connection. */
  hello(): ClientFrame;
  onFrame(frame: ServerFrame): void;
  onStatus(status: SocketStatus): void;
}

const WELCOME_TIMEOUT_MS = 10_000;
const DEFAULT_HEARTBEAT_MS = 25_000;
/** Heartbeats without a frame from the server after which the line counts as dead. */
const SILENT_HEARTBEATS = 2;

export class ChatSocket {
  #socket: WebSocket | null = null;
  #status: SocketStatus = "waiting";
  #attempt = 0;
  #retryTimer: ReturnType<typeof setTimeout> | undefined;
  #heartbeatTimer: ReturnType<typeof setInterval> | undefined;
  #lastHeard = 0;

  constructor(
    private readonly url: string,
    private readonly handlers: SocketHandlers,
  ) {}

  /** Connects now, unless connected or on the way. */
  connect(): void {
    if (this.#socket !== null) return;
    clearTimeout(this.#retryTimer);
    this.#setStatus("connecting");
    const socket = new WebSocket(this.url, SUBPROTOCOL);
    this.#socket = socket;
    this.#heartbeat(socket, WELCOME_TIMEOUT_MS);
    socket.onopen = () => socket.send(JSON.stringify(this.handlers.hello()));
    socket.onmessage = (event) => this.#received(socket, parseFrame(event.data));
    socket.onclose = () => this.#lost(socket);
  }

  /** False when there is no open connection; the frame is then dropped. */
  send(frame: ClientFrame): boolean {
    if (this.#status !== "open" || this.#socket?.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(JSON.stringify(frame));
    return true;
  }

  #received(socket: WebSocket, frame: ServerFrame | null): void {
    if (socket !== this.#socket) return;
    this.#lastHeard = Date.now();
    if (frame === null) return;
    if (frame.type === "welcome") {
      this.#attempt = 0;
      this.#heartbeat(socket, frame.data.heartbeat_ms || DEFAULT_HEARTBEAT_MS);
      this.#setStatus("open");
    }
    this.handlers.onFrame(frame);
  }

  #heartbeat(socket: WebSocket, everyMs: number): void {
    clearInterval(this.#heartbeatTimer);
    this.#lastHeard = Date.now();
    this.#heartbeatTimer = setInterval(() => {
      const silentMs = Date.now() - this.#lastHeard;
      if (this.#status === "connecting" || silentMs > SILENT_HEARTBEATS * everyMs) this.#lost(socket);
      else if (silentMs >= everyMs / 2) this.send({ type: "ping" });
    }, everyMs);
  }

  #lost(socket: WebSocket): void {
    if (socket !== this.#socket) return;
    this.#socket = null;
    clearInterval(this.#heartbeatTimer);
    socket.close();
    this.#setStatus("waiting");
    this.#retryTimer = setTimeout(() => this.connect(), backoffMs(this.#attempt));
    this.#attempt += 1;
  }

  #setStatus(status: SocketStatus): void {
    if (status === this.#status) return;
    this.#status = status;
    this.handlers.onStatus(status);
  }
}
