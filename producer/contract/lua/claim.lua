-- claim: hand ready samples, oldest first, to a worker under a new lease token.
-- KEYS: ready leases sample chunks group results grading dead weights workers request stats config
-- ARGV: worker request version limit held share suspects alone room reserve |
--   request: random, names this call, and is the nonce of its lease tokens
--   held: samples the worker holds; suspects: how many it may take that were in one crash;
--   share: 1 to leave the other workers theirs, of all samples that wait or are held
--   alone: 1 if it may take one that was in several, since it holds no suspect at all;
--   then it gets nothing else, for a fresh sample may be a poison that nobody knows yet
--   room: KV cache tokens that are free; reserve: tokens counted for what is still to be made
-- REPLY: {current, last_good, {headers}, samples that still wait, {groups}}; a header is {id,
--   lease_token, attempts, crashes, interruptions, tokens}, a group {id, job, prompt_ids}
-- INVARIANT: a sample has one holder; the same request gets the same answer; as many closed
--   groups as max_results stop the start of new groups only.
local version = whole(A.version, 'version')
local limit = math.min(whole(A.limit, 'limit'), 256)
local held = whole(A.held, 'held')
local room = whole(A.room, 'room')
local reserve = whole(A.reserve, 'reserve')
local suspects = whole(A.suspects, 'suspects')
local c = config('lease_ms', 'max_results')
local current, good = level()
local headers, jobs = {}, {}

local function header(s, g)
  headers[#headers + 1] = {s.id, s.lease_token, s.attempts, s.crashes, s.interruptions, s.tokens}
  if not g.sent then
    g.sent = true
    jobs[#jobs + 1] = {s.group, g.job, g.prompt_ids}
  end
end

local function group_of(s)
  return group(s.group, 'started', 'restart', 'max_tokens', 'prompt_tokens', 'job', 'prompt_ids')
end

local before = call('GET', K.request .. A.request)
if before then
  for _, id in ipairs(cmsgpack.unpack(before)) do
    local s = sample(id)
    if holds(s, (s and text(s.attempts) or '') .. ':' .. A.request) then
      header(s, group_of(s))
    end
  end
  return {current, good, headers, call('ZCARD', K.ready), jobs}
end
if A.share == '1' then
  local all = call('ZCARD', K.ready) + call('ZCARD', K.leases)
  limit = math.min(limit, math.ceil(all / math.max(1, call('ZCARD', K.workers))) - held)
end
if not serves(version) or limit < 1 then
  return {current, good, headers, call('ZCARD', K.ready), jobs}
end

local expiry = text(now() + c[1])
local open = call('XLEN', K.results) + call('ZCARD', K.grading) < c[2]
local bytes = 0
local ids = {}

local function lease(s, g)
  set_state(s, 'leased')
  set_number(s, 'attempts', s.attempts + 1)
  s.lease_token = text(s.attempts) .. ':' .. A.request
  set(s, 'lease_token', s.lease_token)
  set(s, 'worker', A.worker)
  if s.attempts == 1 then
    set(s, 'started_at', now_text())
  end
  remove(K.ready, s.id)
  add(K.leases, expiry, s.id)
  if g.started ~= '1' then
    call('HSET', K.group .. s.group, 'started', 1)
    g.started = '1'
  end
  if s.tokens > 0 then
    local again = g.prompt_tokens + s.tokens
    local so_far = call('HGET', K.sample .. s.id, 'recomputed_tokens') or 0
    set(s, 'recomputed_tokens', text(so_far + again))
    count('recomputed_tokens', again)
    count('resumed', 1)
  end
  ids[#ids + 1] = s.id
  header(s, g)
end

-- false when the worker has no room for it
local function offer(id)
  local s = sample(id)
  local g = group_of(s)
  if not open and g.started ~= '1' then
    return false
  end
  if judge_staleness(s, current) == 'stale' then
    return true
  end
  if g.restart == '1' and s.tokens > 0 then
    reset(s)
  end
  local need = g.prompt_tokens + s.tokens + math.min(g.max_tokens - s.tokens, reserve)
  local size = g.sent and 0 or #g.job + #g.prompt_ids
  if held + #ids > 0 and (need > room or bytes + size > 4000000) then
    return false
  end
  room = room - need
  bytes = bytes + size
  lease(s, g)
  return true
end

local function offer_range(from, to, most)
  for _, id in ipairs(call('ZRANGEBYSCORE', K.ready, from, to, 'LIMIT', 0, most)) do
    if not offer(id) then
      return
    end
  end
end

if A.alone == '1' then
  offer_range('-inf', '(' .. text(-SUSPECT), 1)
end
if #ids > 0 then
  limit = #ids
elseif suspects > 0 then
  offer_range(text(-SUSPECT), '(0', math.min(suspects, limit))
end
if #ids < limit then
  offer_range('0', '+inf', limit - #ids)
end
if #ids > 0 then
  call('SET', K.request .. A.request, cmsgpack.pack(ids), 'PX', c[1])
  count('claimed', #ids)
end
settle()
return {current, good, headers, call('ZCARD', K.ready), jobs}
