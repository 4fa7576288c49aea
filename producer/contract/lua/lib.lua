-- Shared by every script, after the names that scripts.py makes of its header:
-- K.<key name>, A.<scalar argument>, ITEMS (how many), item(i) -> the fields of item i.
-- Redis does not roll back: arguments are checked before the first write.

local call = redis.call
local SUSPECT = 2 ^ 50 -- a sample that was in n crashes waits at (sequence - n * SUSPECT)

local function whole(value, name)
  local n = string.find(value, '^-?%d+$') and tonumber(value)
  if not n or math.abs(n) > 2 ^ 53 then
    error('ROLLQ ' .. name .. ' must be a whole number, not ' .. tostring(value), 0)
  end
  return n
end

local function text(n)
  return string.format('%.0f', n)
end

local function now()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function config(...)
  local values = call('HMGET', K.config, 'schema', ...)
  if not values[1] then
    error('NOQUEUE this queue is not set up', 0)
  end
  for i = 2, #values do
    values[i - 1] = tonumber(values[i])
  end
  return values
end

local function count(name, by)
  if by ~= 0 then
    call('HINCRBY', K.stats, name, by)
  end
end

-- current and last good weight version; 0 is what the workers were started with
local function level()
  local w = call('HMGET', K.weights, 'current', 'last_good')
  return tonumber(w[1] or 0), tonumber(w[2] or 0)
end

-- may a worker that serves this version start or go on with samples?
local function serves(version)
  local current, good = level()
  if version == current then
    return true
  end
  return version == good and call('HGET', K.weights, text(current) .. ':state') == 'new'
end

-- A worker is off the list, and so has no turn and no place in the line. Returns 1 if it was there.
local function strike(worker)
  call('ZREM', K.starting, worker)
  call('ZREM', K.turns, worker)
  call('ZREM', K.line, worker)
  return call('ZREM', K.workers, worker)
end

-- Those whose heart did not beat since.
local function bury(since)
  local dead = call('ZRANGEBYSCORE', K.workers, '-inf', '(' .. text(since))
  for _, worker in ipairs(dead) do
    strike(worker)
  end
end

local FIELDS = {'state', 'lease_token', 'group', 'index', 'tokens', 'version_first', 'attempts',
  'crashes', 'interruptions', 'restarts', 'seq', 'worker'}

local function sample(id)
  local v = call('HMGET', K.sample .. id, unpack(FIELDS))
  if not v[1] then
    return nil
  end
  local s = {id = id}
  for i, name in ipairs(FIELDS) do
    s[name] = v[i]
  end
  for _, name in ipairs({'tokens', 'version_first', 'attempts', 'crashes', 'interruptions',
    'restarts', 'seq'}) do
    s[name] = tonumber(s[name])
  end
  return s
end

-- Fields of a group's hash, each read once a call.
local groups = {}
local function group(id, ...)
  local g = groups[id]
  if not g then
    local names = {'size', 'max_staleness', 'staleness_policy', 'reward', ...}
    g = {}
    for i, value in ipairs(call('HMGET', K.group .. id, unpack(names))) do
      g[names[i]] = value
    end
    groups[id] = g
  end
  return g
end

local function holds(s, token)
  return s and s.state == 'leased' and s.lease_token == token
end

-- the same call again, after its reply was lost: `state` is what the first one made of it
local function repeated(s, token, state)
  return s and s.state == state and s.lease_token == token
end

local function renew(id, at, lease_ms)
  call('ZADD', K.leases, 'XX', at + lease_ms, id)
end

local function check_chunk(offset, n, version, chunk)
  if whole(offset, 'offset') < 0 or whole(n, 'count') < 1 or whole(version, 'version') < 0 then
    error('ROLLQ a chunk needs offset >= 0, count >= 1 and version >= 0', 0)
  end
  if #chunk > 4194304 then
    error('ROLLQ a chunk has at most 4 MiB, this one ' .. #chunk, 0)
  end
end

-- Tokens are stored once, and in order: a chunk that comes again, or too early, is not.
local function append(s, offset, n, version, chunk)
  if tonumber(offset) ~= s.tokens then
    return 0
  end
  call('RPUSH', K.chunks .. s.id, chunk)
  if s.tokens == 0 then
    s.version_first = tonumber(version)
    call('HSET', K.sample .. s.id, 'tokens', n, 'version_last', version, 'version_first', version)
  else
    call('HSET', K.sample .. s.id, 'tokens', text(s.tokens + n), 'version_last', version)
  end
  s.tokens = s.tokens + n
  return tonumber(n)
end

local function make_ready(s)
  local score = s.seq - s.crashes * SUSPECT
  call('ZREM', K.leases, s.id)
  call('ZADD', K.ready, score, s.id)
  call('HSET', K.sample .. s.id, 'state', 'ready')
end

-- terminal states of a group's members, in order
local function states(group_id)
  local size = tonumber(group(group_id).size)
  local found = {}
  for from = 0, size - 1, 1000 do
    local indices = {}
    for i = from, math.min(from + 999, size - 1) do
      indices[#indices + 1] = i
    end
    for _, state in ipairs(call('HMGET', K.group .. group_id, unpack(indices))) do
      found[#found + 1] = state
    end
  end
  return table.concat(found, ','), size
end

-- put a closed group where trainers read
local function deliver(group_id)
  local members, size = states(group_id)
  call('ZREM', K.grading, group_id)
  local entry = call('XADD', K.results, '*', 'group', group_id, 'size', size, 'states', members)
  call('HSET', K.group .. group_id, 'entry', entry)
  count('groups_closed', 1)
end

-- Every member has ended. A group with a reward function waits for its grader first, unless no
-- member finished: then there is nothing to grade.
local function close(group_id)
  local reward = group(group_id).reward
  if reward and reward ~= '' and string.find((states(group_id)), 'finished', 1, true) then
    call('ZADD', K.grading, now(), group_id)
  else
    deliver(group_id)
  end
end

-- The only way into a terminal state. `keep_token` lets the holder repeat its call; the rest are
-- more fields of the sample's hash.
local function terminate(s, state, reason, err, keep_token, ...)
  if s.state ~= 'leased' then
    call('ZREM', K.ready, s.id)
  end
  call('ZREM', K.leases, s.id)
  call('HSET', K.sample .. s.id, 'state', state, 'finish_reason', reason, 'error', err,
    'finished_at', text(now()), ...)
  if not keep_token then
    call('HDEL', K.sample .. s.id, 'lease_token')
  end
  count(state, 1)
  if state == 'dead' then
    call('ZADD', K.dead, now(), s.id)
  end
  call('HSET', K.group .. s.group, s.index, state)
  local ended = call('HINCRBY', K.group .. s.group, 'ended', 1)
  if ended == tonumber(group(s.group).size) then
    close(s.group)
  end
end

-- forget the response: the sample starts again from its prompt
local function reset(s)
  count('wasted_tokens', s.tokens)
  call('DEL', K.chunks .. s.id)
  call('HSET', K.sample .. s.id, 'tokens', 0, 'version_first', -1, 'version_last', -1)
  s.tokens = 0
  s.version_first = -1
end

-- 'fresh', or what its policy made of a sample whose first token is too old: 'restarted', 'stale'
local function judge_staleness(s, current, keep_token)
  local g = group(s.group)
  local limit = tonumber(g.max_staleness)
  if g.staleness_policy == 'allow' or not limit or s.version_first < 0
      or current - s.version_first <= limit then
    return 'fresh'
  end
  local bucket = math.max(0, math.ceil(math.log(math.max(1, s.tokens)) / math.log(2)))
  if g.staleness_policy == 'restart' and s.restarts < 2 then
    count('restarted_le_' .. text(2 ^ bucket), 1)
    reset(s)
    s.restarts = call('HINCRBY', K.sample .. s.id, 'restarts', 1)
    return 'restarted'
  end
  count('stale_le_' .. text(2 ^ bucket), 1)
  terminate(s, 'stale', 'stale', 'first token ' .. text(current - s.version_first)
    .. ' versions old, allowed are ' .. text(limit), keep_token)
  return 'stale'
end

-- Its worker or engine died. Its next holder holds few other suspects, and after a second
-- crash none, so that a poison sample is found out without its neighbours being given up.
local function crashed(s, max_crashes, err)
  s.crashes = call('HINCRBY', K.sample .. s.id, 'crashes', 1)
  call('HDEL', K.sample .. s.id, 'lease_token')
  call('HSET', K.sample .. s.id, 'error', err)
  count('crashes', 1)
  if s.crashes >= max_crashes then
    terminate(s, 'dead', 'error', 'its worker died ' .. text(s.crashes) .. ' times; last: ' .. err)
    return true
  end
  make_ready(s)
  return false
end

-- A trainer has taken this group: nothing stays but its tombstone, and its dead to be looked at.
-- `g` are its digest, size, job and prompt_ids.
local function take(id, g, consumer, tombstone_ms)
  for index = 0, g[2] - 1 do
    local sid = id .. '/' .. index
    if call('ZSCORE', K.dead, sid) then
      local kept = {'max_staleness', 'staleness_policy', 'reward'}
      for i, value in ipairs(call('HMGET', K.group .. id, unpack(kept))) do
        call('HSET', K.sample .. sid, kept[i], value or '')
      end
      call('HSET', K.sample .. sid, 'job', g[3], 'prompt_ids', g[4])
    else
      call('UNLINK', K.sample .. sid, K.chunks .. sid)
    end
  end
  call('SET', K.done .. id, g[1] .. ' ' .. consumer, 'PX', tombstone_ms)
  call('UNLINK', K.group .. id)
  count('groups_acked', 1)
end

-- the consumer that a tombstone names
local function taker(tombstone)
  return string.match(tombstone, ' (.*)$')
end

-- no other attempt at grading follows: deliver the group with the grader's error
local function grading_failed(group_id, err)
  call('HSET', K.group .. group_id, 'reward_error', err)
  count('grading_failed', 1)
  deliver(group_id)
end

-- The last attempt that began never said how it ended: its process is gone, or stands still.
local function never_ended(group_id, attempts)
  local err = call('HGET', K.group .. group_id, 'reward_error') or ''
  if err ~= '' then
    err = '; before that: ' .. err
  end
  grading_failed(group_id, 'the grader was killed or took too long, ' .. text(attempts)
    .. ' attempts were made' .. err)
end
