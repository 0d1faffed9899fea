// Browsers refuse to start a worker from the file system. There, and only there, the search runs in
// a hidden frame that has a worker's interface.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentWindow;
      inner.document.open();
      // The frame's own postMessage would be delivered to the frame itself.
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.document.write(`<!doctype html><script src="${url}"></` + "script>");
      inner.document.close();
      this.ready = new Promise((resolve) => inner.addEventListener("load", resolve));
    }
    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
