-- SPDX-License-Identifier: Apache-2.0
-- Requests of the calendar in the mix of paper 002, table 2 (counts of the first column), and what came of them.
local mix = {
  { 4028, "/" },
  { 1629, "/login", PERSONS },
  { 5183, "/tag", 50 },
  { 3856, "/event", EVENTS },
  { 405, "/person", PERSONS },
  { 127, "/add_person", 1000000 },
  { 300, "/add_event", 1000000 },
}
local all = 0
for _, each in ipairs(mix) do all = all + each[1] end
local threads = {}
cut = 0

function setup(thread) table.insert(threads, thread) end

function init() math.randomseed(SEED) end

function request()
  local left = math.random(all)
  for _, each in ipairs(mix) do
    left = left - each[1]
    if left <= 0 then
      local path = each[2]
      if path == "/tag" then
        path = path .. "?n=tag" .. (math.random(each[3]) - 1)
      elseif each[3] then
        path = path .. "?n=" .. math.random(each[3])
      end
      return wrk.format(nil, path)
    end
  end
end

function response(status, headers, body)
  if not body:find("</html>", -9, true) then cut = cut + 1 end
end

function done(summary, latency, requests)
  local e, bad = summary.errors, 0
  for _, thread in ipairs(threads) do bad = bad + thread:get("cut") end
  io.write(string.format("counted %d %d %d %d %d\n", summary.duration, summary.requests,
    e.connect + e.read + e.write + e.status + e.timeout + bad, latency:percentile(50), latency:percentile(99)))
end
