/** The address is the open chat: `#/c/<session id>`; everything else is a new one. */
const CHAT = /^#\/c\/([\w-]+)$/;

export function sessionInHash(hash: string): string | null {
  return CHAT.exec(hash)?.[1] ?? null;
}

export function hashOf(session: string | null): string {
  return session === null ? "#/" : `#/c/${session}`;
}
