import type { Attachment } from "svelte/attachments";

/** Distances to the end in pixels: closer than NEAR_PX sticks again, farther than LEFT_PX upwards lets go. */
const NEAR_PX = 40;
const LEFT_PX = 8;

/** Keeps a scroll area at its end while the content grows, until the reader scrolls up. */
export class StickToBottom {
  stuck = $state(true);
  #viewport: HTMLElement | null = null;

  /** For the scroll area; its first child holds the content. */
  readonly attach: Attachment<HTMLElement> = (viewport) => {
    this.#viewport = viewport;
    let lastTop = viewport.scrollTop;
    const follow = new ResizeObserver(() => {
      if (this.stuck) viewport.scrollTop = viewport.scrollHeight;
    });
    const scrolled = () => {
      const gap = viewport.scrollHeight - viewport.scrollTop - viewport.clientHeight;
      if (viewport.scrollTop < lastTop && gap > LEFT_PX) this.stuck = false;
      else if (gap < NEAR_PX) this.stuck = true;
      lastTop = viewport.scrollTop;
    };
    follow.observe(viewport);
    if (viewport.firstElementChild !== null) follow.observe(viewport.firstElementChild);
    viewport.addEventListener("scroll", scrolled, { passive: true });
    return () => {
      follow.disconnect();
      viewport.removeEventListener("scroll", scrolled);
    };
  };

  jump(): void {
    this.stuck = true;
    if (this.#viewport !== null) this.#viewport.scrollTop = this.#viewport.scrollHeight;
  }
}
