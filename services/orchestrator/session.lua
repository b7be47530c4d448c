-- All writes of a session's keys, each one atomic. ARGV[1] names the operation; the reply is
-- {status, ...}, and `services/orchestrator/store.py` turns a status into an error.
--
-- KEYS[1]: meta, a hash.  KEYS[2]: log, token ids of 4 bytes.  KEYS[3]: notes, `width` bytes for each
-- token of the last generation.  All share a hash tag, so that the script runs in Redis Cluster; no
-- other key is touched. All exist from the beginning, empty where there is nothing yet: while a slot
-- moves, a script that names a key which is not there can run on neither node.
--
-- Nonces and hashes have 64 bits and stay strings here: a Lua number is a double.
--
-- Out of memory: Redis refuses a script's first write when that write needs memory, and lets pass
-- all that follow it. So APPEND and new records come first (nothing is half done), and what must
-- work with a full memory (finish, renew, take, resume, detach) begins with PEXPIREAT, which is never
-- refused.

local meta, log, notes = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) -- ms

local function whole(number)
  return string.format('%.0f', number)
end

local function expire_in(ms)
  local at = whole(now + ms)
  redis.call('PEXPIREAT', meta, at)
  redis.call('PEXPIREAT', log, at)
  redis.call('PEXPIREAT', notes, at)
end

-- Whether no key was evicted. `from` and `width` are those of the last generation, if there is one.
local function is_whole(len, from, width)
  return redis.call('STRLEN', log) == 4 * len
    and redis.call('STRLEN', notes) == tonumber(width or 0) * (len - tonumber(from or len))
end

-- What the owner that ARGV[2] (epoch) and ARGV[3] (nonce) name may change; else nil and why not.
local function owned()
  local field = redis.call('HMGET', meta, 'epoch', 'nonce', 'len', 'hash', 'prev_len',
    'prev_hash', 'gens', 'request', 'running', 'from', 'width', 'ttl')
  if not field[1] then
    return nil, { 'not_found' }
  end
  if field[1] ~= ARGV[2] or field[2] ~= ARGV[3] then
    return nil, { 'fenced', 'owner', tonumber(field[1]) }
  end
  local session = {
    epoch = field[1],
    len = tonumber(field[3]),
    hash = field[4],
    prev_len = tonumber(field[5]),
    prev_hash = field[6],
    gens = tonumber(field[7]),
    request = field[8],
    running = field[9], -- epoch in which the running generation was begun; false: none runs
    width = tonumber(field[11] or 0),
    ttl = tonumber(field[12] or 0), -- ms that it lives after each write while a generation runs
  }
  if not is_whole(session.len, field[10], field[11]) then
    return nil, { 'not_found' }
  end
  return session
end

-- Why `bytes` cannot stand at token index `from`, or nil.
local function misplaced(session, from, from_hash, bytes, new_hash)
  local to = from + #bytes / 4
  if from > session.len then
    return { 'fenced', 'gap', session.len, from }
  end
  if (from == session.len and from_hash ~= session.hash)
      or (from == session.prev_len and from_hash ~= session.prev_hash)
      or (to == session.len and new_hash ~= session.hash) then
    return { 'fenced', 'prefix', session.len }
  end
  local known = 4 * (math.min(to, session.len) - from)
  if known > 0 and redis.call('GETRANGE', log, 4 * from, 4 * from + known - 1)
      ~= string.sub(bytes, 1, known) then
    return { 'fenced', 'tokens', session.len }
  end
end

-- Append what of `bytes` is new, and of its notes. The boundary before it is kept with its hash, so
-- that a retried commit, which starts there, is checked by its prefix hash too.
local function append(session, from, bytes, new_hash, noted, progress)
  local to = from + #bytes / 4
  if to <= session.len then
    return session.len
  end
  redis.call('APPEND', log, string.sub(bytes, 4 * (session.len - from) + 1))
  if session.width > 0 and noted then
    redis.call('APPEND', notes, string.sub(noted, session.width * (session.len - from) + 1))
  end
  if from ~= session.prev_len then
    redis.call('HSET', meta, 'prev_len', session.len, 'prev_hash', session.hash)
  end
  redis.call('HSET', meta, 'len', to, 'hash', new_hash, 'progress', progress or '')
  return to
end

local function hold(lease_ms, ttl_ms)
  expire_in(ttl_ms)
  redis.call('HSET', meta, 'lease_until', whole(now + lease_ms))
end

local function own(nonce, owner)
  redis.call('HINCRBY', meta, 'epoch', 1)
  redis.call('HSET', meta, 'nonce', nonce, 'owner', owner)
end

local function snapshot(with_tokens)
  local field = redis.call('HGETALL', meta)
  local bytes = with_tokens and redis.call('GETRANGE', log, 0, -1) or ''
  local noted = with_tokens and redis.call('GETRANGE', notes, 0, -1) or ''
  return { 'ok', field, bytes, noted, redis.call('PTTL', meta), whole(now) }
end

-- Why `tenant` cannot look at the session, or nil.
local function closed_to(tenant)
  local field = redis.call('HMGET', meta, 'tenant', 'len', 'from', 'width')
  if not field[1] then
    return { 'not_found' }
  end
  if field[1] ~= tenant then
    return { 'denied' }
  end
  if not is_whole(tonumber(field[2]), field[3], field[4]) then
    return { 'not_found' }
  end
end

local operation = {}

-- The first epoch is the time: an id that comes again is not taken for its former self by those who
-- remember that.
function operation.create(nonce, ttl_ms, tenant, model, adapter, tokenizer, owner)
  if redis.call('EXISTS', meta, log) > 0 then
    local field = redis.call('HMGET', meta, 'epoch', 'nonce')
    if field[2] == nonce then -- a lost reply
      return { 'ok', field[1] }
    end
    return { 'exists' }
  end
  redis.call('HSET', meta, 'tenant', tenant, 'model', model, 'adapter', adapter, 'tokenizer',
    tokenizer, 'epoch', whole(now), 'nonce', nonce, 'owner', owner, 'len', '0', 'hash', '0',
    'prev_len', '0', 'prev_hash', '0', 'gens', '0', 'created', whole(now))
  redis.call('APPEND', log, '')
  redis.call('APPEND', notes, '')
  expire_in(ttl_ms)
  return { 'ok', whole(now) }
end

-- `request` is about to begin ("": none is): what another one has left running, without an owner,
-- will not be gone on with.
function operation.take(tenant, nonce, owner, lease_ms, request)
  local closed = closed_to(tenant)
  if closed then
    return closed
  end
  local field = redis.call('HMGET', meta, 'nonce', 'running', 'lease_until', 'request')
  if field[1] ~= nonce then -- equal: taken already, the reply was lost
    local left = field[2] and tonumber(field[3]) - now or 0
    if left > 0 then
      return { 'running', left }
    end
    expire_in(math.max(redis.call('PTTL', meta), lease_ms))
    own(nonce, owner)
    if field[2] and request ~= '' and field[4] ~= request then
      redis.call('HDEL', meta, 'running', 'lease_until')
    elseif field[2] then
      redis.call('HSET', meta, 'lease_until', whole(now + lease_ms))
    end
  end
  return snapshot(true)
end

-- Whoever names the running generation's request may take it at once, lease or not: its owner tells
-- nobody what is not committed, and cannot commit any more. What has ended is only looked at.
function operation.resume(tenant, nonce, owner, lease_ms, request, key, offset)
  local closed = closed_to(tenant)
  if closed then
    return closed
  end
  local field = redis.call('HMGET', meta, 'nonce', 'request', 'key', 'running', 'gens', 'from', 'len',
    'ttl')
  if field[2] ~= request or (key ~= '' and field[3] ~= key) then
    return { 'other_request' }
  end
  local told = field[7] - field[6]
  if tonumber(offset) > told then
    return { 'lost', told }
  end
  if field[4] and field[1] ~= nonce then
    expire_in(tonumber(field[8]))
    own(nonce, owner)
    redis.call('HSET', meta, 'lease_until', whole(now + lease_ms), 'running',
      redis.call('HGET', meta, 'epoch'))
  elseif not field[4] and redis.call('HEXISTS', meta, 'fin:' .. field[5] - 1) == 0 then
    return { 'cut_off' }
  end
  return snapshot(true)
end

function operation.get(tenant, with_tokens)
  return closed_to(tenant) or snapshot(with_tokens == '1')
end

function operation.begin(_, _, lease_ms, ttl_ms, from, from_hash, bytes, new_hash, request, record,
                         key, width, left_ms)
  local session, refusal = owned()
  if not session then
    return refusal
  end
  from = tonumber(from)
  if session.request == request then -- a lost reply, or the request taken over
    if not session.running
        or redis.call('HGET', meta, 'gen:' .. session.gens - 1) ~= record then
      return { 'used' }
    end
  elseif session.running == session.epoch then
    return { 'running', 0 }
  elseif from ~= session.len then
    return { 'fenced', 'gap', session.len }
  end
  refusal = misplaced(session, from, from_hash, bytes, new_hash)
  if refusal then
    return session.request == request and { 'used' } or refusal -- the same id for another prompt
  end
  local len = session.len
  if session.request ~= request then
    redis.call('HSET', meta, 'gen:' .. session.gens, record, 'gens', session.gens + 1, 'request',
      request, 'key', key, 'from', from + #bytes / 4, 'width', width, 'ttl', ttl_ms, 'began',
      whole(now), 'until', whole(now + left_ms))
    redis.call('UNLINK', notes)
    redis.call('APPEND', notes, '')
    len = append(session, from, bytes, new_hash)
  end
  hold(lease_ms, ttl_ms)
  redis.call('HSET', meta, 'running', session.epoch)
  return { 'ok', len }
end

function operation.commit(_, _, lease_ms, from, from_hash, bytes, new_hash, noted, progress)
  local session, refusal = owned()
  if not session then
    return refusal
  end
  from = tonumber(from)
  refusal = misplaced(session, from, from_hash, bytes, new_hash)
  if refusal then
    return refusal
  end
  if #noted ~= session.width * #bytes / 4 then
    return { 'notes', session.width }
  end
  if not session.running then
    if from + #bytes / 4 > session.len then
      return { 'fenced', 'idle', session.len }
    end
    return { 'ok', session.len } -- a late copy: it must not lengthen a life that finish cut
  end
  local len = append(session, from, bytes, new_hash, noted, progress)
  hold(lease_ms, session.ttl)
  return { 'ok', len }
end

function operation.renew(_, _, lease_ms)
  local session, refusal = owned()
  if not session then
    return refusal
  end
  if session.running then -- else about to begin, or ended: a life that finish cut stays cut
    hold(lease_ms, session.ttl)
  end
  return { 'ok' }
end

-- Its stream broke off: the generation stays as it is, for whoever resumes it, without a lease.
function operation.detach(_, _, ttl_ms)
  local session, refusal = owned()
  if not session then
    return refusal
  end
  if session.running then
    expire_in(ttl_ms)
    redis.call('HSET', meta, 'lease_until', whole(now))
  end
  return { 'ok' }
end

function operation.finish(_, _, ttl_ms, outcome, progress)
  local session, refusal = owned()
  if not session then
    return refusal
  end
  expire_in(ttl_ms)
  if session.running then
    redis.call('HDEL', meta, 'running', 'lease_until')
    if outcome ~= '' then
      redis.call('HSET', meta, 'fin:' .. session.gens - 1, outcome, 'progress', progress)
    end
  end
  return { 'ok' }
end

function operation.delete(epoch, nonce)
  local field = redis.call('HMGET', meta, 'epoch', 'nonce')
  if field[1] and (field[1] ~= epoch or field[2] ~= nonce) then
    return { 'fenced', 'owner', tonumber(field[1]) }
  end
  redis.call('UNLINK', meta, log, notes)
  return { 'ok' }
end

-- Whoever runs it. The epoch is one that nobody has had: what its owner still has under way
-- elsewhere is closed in its name.
function operation.remove(tenant)
  local field = redis.call('HMGET', meta, 'tenant', 'epoch')
  if field[1] and field[1] ~= tenant then
    return { 'denied' }
  end
  local found = redis.call('UNLINK', meta, log, notes)
  if found == 0 or not field[1] then
    return { 'not_found' }
  end
  return { 'ok', field[2] + 1 }
end

return operation[ARGV[1]](unpack(ARGV, 2))
