/** The REST calls of this page. Every call rejects with ApiError; status 0 means that nothing answered. */
import type { Info, Message, Session, SessionPage } from "./types";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

async function call<T>(method: string, path: string, body?: unknown): Promise<T> {
  const init: RequestInit = { method, headers: { Accept: "application/json" } };
  if (body !== undefined) {
    init.headers = { Accept: "application/json", "Content-Type": "application/json" };
    init.body = JSON.stringify(body);
  }
  let response: Response;
  try {
    response = await fetch(path, init);
  } catch {
    throw new ApiError(0, "unreachable", "");
  }
  if (!response.ok) throw await problemOf(response);
  if (response.status === 204) return undefined as T;
  try {
    return (await response.json()) as T;
  } catch {
    throw new ApiError(0, "unreachable", "");
  }
}

async function problemOf(response: Response): Promise<ApiError> {
  const problem = (await response.json().catch(() => ({}))) as { code?: string; detail?: string; title?: string };
  const code = problem.code ?? `http_${response.status}`;
  return new ApiError(response.status, code, problem.detail ?? problem.title ?? "");
}

const NOT_READY = ["loading", "failed", "draining", "storage_busy"] as const;

/** "unreachable" is our own word: nothing answered, or nothing that we know. */
export type Readiness = "ready" | "unreachable" | (typeof NOT_READY)[number];

const segment = encodeURIComponent;

export const rest = {
  info: () => call<Info>("GET", "/api/v1/info"),

  sessions: (limit: number, after: string | null) =>
    call<SessionPage>("GET", `/api/v1/sessions?limit=${limit}${after === null ? "" : `&after=${segment(after)}`}`),

  session: (id: string) => call<Session>("GET", `/api/v1/sessions/${segment(id)}`),

  createSession: (systemPrompt: string | null) =>
    call<Session>("POST", "/api/v1/sessions", systemPrompt === null ? {} : { system_prompt: systemPrompt }),

  deleteSession: (id: string) => call<void>("DELETE", `/api/v1/sessions/${segment(id)}`),

  messages: async (id: string) =>
    (await call<{ data: Message[] }>("GET", `/api/v1/sessions/${segment(id)}/messages`)).data,

  /** Whether the server takes turns now, and why not. */
  async readiness(): Promise<Readiness> {
    try {
      const response = await fetch("/ready", { cache: "no-store" });
      if (response.ok) return "ready";
      if (response.status !== 503) return "unreachable";
      const { status } = (await response.json()) as { status?: unknown };
      return NOT_READY.find((known) => known === status) ?? "unreachable";
    } catch {
      return "unreachable";
    }
  },
};
