-- The lease of one worker, as the orchestrators that use it renew it together.
--
-- KEYS[1]: a hash with a field for each orchestrator: "UNTIL LOAD", the time in ms at which it is
-- out of date, and what that orchestrator has there (JSON). No other key is touched.
-- ARGV: "renew", orchestrator, how long in ms, load  |  "leave", orchestrator.
-- The reply is {"ok", load, ...} with the loads of the others whose time is not over.

local key, operation, own = KEYS[1], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) -- ms

local function whole(number)
  return string.format('%.0f', number)
end

if operation == 'leave' then
  redis.call('HDEL', key, own)
  return { 'ok' }
end

local lease = tonumber(ARGV[3])
redis.call('HSET', key, own, whole(now + lease) .. ' ' .. ARGV[4])
redis.call('PEXPIREAT', key, whole(now + lease))

local reply = { 'ok' }
local flat = redis.call('HGETALL', key)
for i = 1, #flat, 2 do
  if flat[i] ~= own then
    local until_ms, load = string.match(flat[i + 1], '^(%d+) (.*)$')
    if until_ms and tonumber(until_ms) > now then
      reply[#reply + 1] = load
    else
      redis.call('HDEL', key, flat[i])
    end
  end
end
return reply
