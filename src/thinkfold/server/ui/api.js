// Calls to this server: the key, errors as their messages, and event streams.

const STORED = "thinkfold.key";

export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function useKey(key) {
  sessionStorage.setItem(STORED, key);
}

export const hasKey = () => Boolean(sessionStorage.getItem(STORED));

export async function call(path, body, signal) {
  const key = sessionStorage.getItem(STORED);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, credentials: "omit", cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const response = await fetch(path, options);
  if (!response.ok) throw new ApiError(response.status, await complaint(response), Number(response.headers.get("Retry-After")) || 0);
  return response;
}

export const json = async (path, body) => (await call(path, body)).json();

async function complaint(response) {
  try {
    const { error, reason } = await response.json();
    return error?.message ?? reason ?? response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

// Yields {name, data} for each server-sent event; ends with [DONE] or the connection.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length === 0) continue; // a sign of life
      const text = data.join("\n");
      if (text === "[DONE]") return;
      yield { name, data: JSON.parse(text) };
    }
  }
}
