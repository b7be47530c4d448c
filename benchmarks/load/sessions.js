// Sessions with shared prefixes, over gRPC, each checked for lost and doubled tokens.
// benchmarks/load/run.py starts this and reads what it prints: a line of JSON for each session.

import grpc from 'k6/net/grpc';
import exec from 'k6/execution';

const settings = JSON.parse(__ENV.SETTINGS);

export const options = {
  scenarios: {
    sessions: {
      executor: 'shared-iterations',
      vus: settings.concurrency,
      iterations: settings.sessions,
      maxDuration: `${settings.max_s}s`,
    },
  },
  discardResponseBodies: false,
};

const client = new grpc.Client();
client.load([settings.protos], 'outrider/v1/generation.proto');
let connected = false;

// A generator of its own for each part of a prompt: equal numbers give equal tokens.
function tokens(part, count) {
  let state = (part * 2654435761 + 12345) >>> 0;
  const found = [];
  for (let i = 0; i < count; i++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    found.push((state >>> 16) % 250);
  }
  return found;
}

// Of few prefixes some are asked for much more often than others; questions come again, so that
// equal requests can be compared.
function keyOf(number) {
  if (settings.keys.length) return settings.keys[number];
  const chance = tokens(1000003 + number, 3);
  const rank = Math.floor(settings.prefixes ** (((chance[0] << 8) + chance[1]) / (250 << 8)));
  return `${rank}/${chance[2] % settings.questions}`;
}

function request(key) {
  const [rank, question] = key.split('/').map(Number);
  const system = tokens(rank % settings.systems, settings.system_tokens);
  const prefix = tokens(100 + rank, settings.prefix_tokens);
  const own = tokens(5000 + rank * 512 + question, settings.question_tokens);
  const message = {
    prompt: [{ tokens: { ids: system.concat(prefix, own) } }],
    sampling: { temperature: 0.8, seed: String(rank * 512 + question) },
    stop: { maxTokens: settings.max_tokens, ignoreEos: true },
  };
  if (settings.plain) message.speculation = { numSpeculativeTokens: 0 };
  return message;
}

export default function () {
  const number = exec.scenario.iterationInTest;
  if (!connected) {
    const address = settings.addresses[exec.vu.idInTest % settings.addresses.length];
    client.connect(address, { plaintext: true });
    connected = true;
  }
  const key = keyOf(number);
  ask(number, key, request(key), Date.now(), 0);
}

function ask(number, key, message, started, refusals) {
  const ids = [];
  const asked = Date.now();
  let first = 0;
  let last = null;
  let fault = '';
  let refused = '';
  const stream = new grpc.Stream(client, 'outrider.v1.GenerationService/Generate', {});
  stream.on('data', (response) => {
    const given = response.tokenIds || [];
    if (given.length && Number(response.offset || 0) !== ids.length) {
      fault = `token ${ids.length} was due, ${response.offset} came`;
    }
    first = first || Date.now();
    ids.push(...given);
    last = response;
  });
  let over = false;
  const end = (error) => {
    if (over) return;
    over = true;
    const isRefusal = error && error.code === grpc.StatusResourceExhausted && !ids.length;
    if (isRefusal && refusals < 1000) {
      setTimeout(() => ask(number, key, message, started, refusals + 1), wait(error));
      return;
    }
    const usage = (last && last.usage) || {};
    if (isRefusal) refused = error.message;
    else if (error) fault = `${error.code} ${error.message}`;
    else if (!usage.completionTokens) fault = 'it ended without usage';
    else if (usage.completionTokens !== ids.length) {
      fault = `${usage.completionTokens} tokens were counted, ${ids.length} came`;
    }
    const rounds = (usage.speculation && usage.speculation.rounds) || 0;
    console.log(
      JSON.stringify({
        number, key, fault, refused, refusals, rounds,
        retry_s: isRefusal ? retryAfter(error) : null,
        ids: ids.join(' '),
        prompt: usage.promptTokens || 0,
        cached: usage.cachedPromptTokens || 0,
        asked_ms: asked,
        ttft_ms: first - started,
        total_ms: Date.now() - started,
        last_try_ms: Date.now() - asked,
      }),
    );
  };
  stream.on('error', end);
  stream.on('end', () => end(null));
  stream.write(message);
  stream.end();
}

// Seconds that google.rpc.RetryInfo among a refusal's details names; null where there is none.
function retryAfter(error) {
  for (const detail of error.details || []) {
    const delay = detail.retryDelay || detail.retry_delay;
    if (delay !== undefined) return parseFloat(delay.seconds !== undefined ? delay.seconds : delay);
  }
  return null;
}

function wait(error) {
  return 1000 * (retryAfter(error) || 0.5) * (1 + Math.random());
}
