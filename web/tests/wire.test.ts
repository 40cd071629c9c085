import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { backoffMs } from "../src/wire/backoff";
import { parseFrame, type ServerFrame } from "../src/wire/frames";
import { ChatSocket, type SocketStatus } from "../src/wire/socket";
import { hashOf, sessionInHash } from "../src/app/route";

it.each([
  [0, 0, 250],
  [0, 1, 500],
  [3, 1, 4000],
  [30, 1, 15_000],
  [30, 0, 7500],
])("reconnect %d with luck %d waits %d ms", (attempt, luck, ms) => {
  expect(backoffMs(attempt, () => luck)).toBe(ms);
});

it.each(["", "nonsense", "null", "[]", '{"a":1}', '{"type":3}'])("no frame: %s", (text) => {
  expect(parseFrame(text)).toBeNull();
});

it.each([
  ["#/c/ses_01ABC", "ses_01ABC"],
  ["#/c/", null],
  ["#/", null],
  ["", null],
  ["#/c/a/b", null],
])("address %s opens %s", (hash, session) => {
  expect(sessionInHash(hash)).toBe(session);
  if (session !== null) expect(hashOf(session)).toBe(hash);
});

class FakeWebSocket {
  static readonly OPEN = 1;
  static readonly made: FakeWebSocket[] = [];
  readyState = FakeWebSocket.OPEN;
  readonly sent: unknown[] = [];
  onopen: () => void = () => {};
  onmessage: (event: { data: string }) => void = () => {};
  onclose: () => void = () => {};

  constructor() {
    FakeWebSocket.made.push(this);
  }

  send(text: string) {
    this.sent.push(JSON.parse(text));
  }

  close() {
    this.readyState = 3;
    this.onclose();
  }

  welcome(heartbeat_ms = 1000) {
    this.onopen();
    this.onmessage({ data: JSON.stringify({ type: "welcome", data: { connection_id: "1", heartbeat_ms } }) });
  }
}

describe("the socket", () => {
  const frames: ServerFrame[] = [];
  const statuses: SocketStatus[] = [];
  const latest = () => FakeWebSocket.made.at(-1) as FakeWebSocket;
  let socket: ChatSocket;

  beforeEach(() => {
    vi.useFakeTimers();
    vi.stubGlobal("WebSocket", FakeWebSocket);
    FakeWebSocket.made.length = frames.length = statuses.length = 0;
    socket = new ChatSocket("ws://test/ws", {
      hello: () => ({ type: "hello", resume: [{ generation: "gen_1", last_seq: 3 }] }),
      onFrame: (frame) => frames.push(frame),
      onStatus: (status) => statuses.push(status),
    });
    socket.connect();
  });
  afterEach(() => {
    vi.useRealTimers();
    vi.unstubAllGlobals();
  });

  it("says hello first and is open from the welcome on", () => {
    expect(socket.send({ type: "ping" })).toBe(false);
    latest().welcome();
    expect(latest().sent).toEqual([{ type: "hello", resume: [{ generation: "gen_1", last_seq: 3 }] }]);
    expect(socket.send({ type: "ping" })).toBe(true);
    expect(statuses).toEqual(["connecting", "open"]);
  });

  it("reconnects after a loss, later and later, until welcomed", () => {
    latest().welcome();
    for (const longest of [500, 1000, 2000]) {
      latest().close();
      const made = FakeWebSocket.made.length;
      vi.advanceTimersByTime(longest / 2 - 1);
      expect(FakeWebSocket.made).toHaveLength(made);
      vi.advanceTimersByTime(longest / 2 + 1);
      expect(FakeWebSocket.made).toHaveLength(made + 1);
    }
    expect(statuses.slice(0, 4)).toEqual(["connecting", "open", "waiting", "connecting"]);
  });

  it("pings a silent line and gives it up when nothing answers", () => {
    latest().welcome();
    const first = latest();
    vi.advanceTimersByTime(1000);
    expect(first.sent.at(-1)).toEqual({ type: "ping" });
    vi.advanceTimersByTime(2500);
    expect(first.readyState).toBe(3);
  });

  it("gives up a connection without a welcome", () => {
    vi.advanceTimersByTime(10_000);
    expect(statuses).toEqual(["connecting", "waiting"]);
  });
});
