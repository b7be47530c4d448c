-- The live sessions of one caller: KEYS[1], a sorted set of session ids by when they expire (ms).
-- ARGV[1] names the operation. No session's own key is touched: those lie in other slots of a Redis
-- Cluster. So the set may lag behind them by as long as its users are late to say what they did; an
-- entry never outlives its time.

local index = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function whole(number)
  return string.format('%.0f', number)
end

local function drop_expired()
  redis.call('ZREMRANGEBYSCORE', index, '-inf', whole(now))
end

-- The set lives as long as the last of its entries.
local function keep_while_needed()
  local last = redis.call('ZREVRANGE', index, 0, 0, 'WITHSCORES')
  if last[2] then
    redis.call('PEXPIREAT', index, whole(tonumber(last[2])))
  end
end

local operation = {}

function operation.reserve(session, ttl_ms, limit)
  drop_expired()
  limit = tonumber(limit)
  local count = redis.call('ZCARD', index)
  if limit > 0 and count >= limit and not redis.call('ZSCORE', index, session) then
    return { 'full', count }
  end
  local added = redis.call('ZADD', index, whole(now + ttl_ms), session)
  keep_while_needed()
  return { 'ok', added }
end

function operation.touch(session, ttl_ms)
  redis.call('ZADD', index, whole(now + ttl_ms), session)
  keep_while_needed()
  return { 'ok' }
end

function operation.remove(...)
  redis.call('ZREM', index, ...)
  keep_while_needed()
  return { 'ok' }
end

function operation.list()
  drop_expired()
  return { 'ok', redis.call('ZRANGE', index, 0, -1) }
end

return operation[ARGV[1]](unpack(ARGV, 2))
