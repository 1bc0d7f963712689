-- What Slurm prefers for jobs that read a dataset of cachefs. job_submit.lua and cli_filter.lua call it.
--
-- It reads one small local file, which cachefs-slurm-hint writes, and never asks anything over a network: a slow call
-- here holds up the whole controller. Where the file is missing, old or strange, jobs are left as they are.
-- Lua 5.1 and newer.

local cachefs = {}

-- Written by cachefs-slurm-hint; `hint_file` of its configuration.
cachefs.file = "/run/cachefs-slurm-hint/hints"

local MOST_BYTES = 1048576   -- of the file
local MOST_LINES = 1000      -- of a batch script in which directives are looked for
local MOST_LINE = 1000       -- characters of a directive
local MOST_COMMENT = 4096    -- characters of a comment that are looked at
local MOST_OPTIONS = 4       -- of a preference: each makes slurmctld look at the nodes once more
local MOST_PREFER = 1000     -- characters; Slurm refuses jobs with 1024
local POLICIES = { prefer = true, require = true, suspend = true, clone = true }

-- ---- what a job reads ------------------------------------------------------------------------------------------------

local function set_word(wish, key, value)
    if not value then
        return "nothing is said of " .. key:sub(1, 80) .. "; write " .. key:sub(1, 80) .. "=VALUE, without blanks"
    end
    if key == "dataset" then
        if not (value:match("^[%w_][%w._-]*$") or value:match("^[%w_][%w._-]*@%w+$")) or #value > 130 then
            return "no name of a dataset: " .. value:sub(1, 80)
        end
        wish.dataset = value
    elseif key == "policy" then
        if not POLICIES[value] then
            return "no policy: " .. value:sub(1, 80) .. " (there are prefer, require, suspend, clone)"
        end
        wish.policy = value
    elseif key == "max-jobs-per-copy" then
        if not value:match("^%d%d?%d?%d?%d?%d?$") then
            return "no number of jobs: " .. value:sub(1, 80)
        end
        wish.jobs = value
    else
        return "unknown word: " .. key:sub(1, 80)
    end
end

-- "key=value" as two; without a value, only the key.
local function split(word)
    local key, value = word:match("^([^=]*)=(.+)$")
    return key or word, value
end

-- "#CACHEFS dataset=imagenet policy=suspend" lines, before the first command of a batch script.
local function read_script(wish, script)
    local count = 0
    for line in script:gmatch("([^\n]*)\n?") do
        count = count + 1
        if count > MOST_LINES or (line ~= "" and not line:match("^%s*#") and not line:match("^%s*$")) then
            return
        end
        local words = line:match("^#CACHEFS%s+(.*)")
        if words and #line > MOST_LINE then
            wish.problem = "a #CACHEFS line of more than " .. MOST_LINE .. " characters"
            words = nil
        end
        for word in (words or ""):gmatch("%S+") do
            wish.problem = set_word(wish, split(word)) or wish.problem
        end
    end
end

-- "cachefs:imagenet,policy=suspend" somewhere in a comment.
local function read_comment(wish, comment)
    local text = (" " .. comment:sub(1, MOST_COMMENT)):match("[%s;]cachefs:([^%s;]*)")
    if not text then
        return
    end
    local dataset, rest = text:match("^([^,]*)(.*)$")
    wish.problem = set_word(wish, "dataset", dataset) or wish.problem
    for word in rest:gmatch(",([^,]*)") do
        wish.problem = set_word(wish, split(word)) or wish.problem
    end
end

local function read_environment(wish, get)
    for key, name in pairs({ dataset = "CACHEFS_DATASET", policy = "CACHEFS_POLICY",
                             ["max-jobs-per-copy"] = "CACHEFS_MAX_JOBS_PER_COPY" }) do
        local value = get(name)
        if value and value ~= "" then
            wish.problem = set_word(wish, key, value) or wish.problem
        end
    end
end

-- As with sbatch's own options: the command line, then the environment, then the script.
function cachefs.wish(script, get, comment)
    local wish = { policy = "prefer" }
    read_script(wish, script or "")
    read_environment(wish, get)
    read_comment(wish, comment or "")
    return wish
end

-- ---- the hint file ---------------------------------------------------------------------------------------------------

local function first_line(path)
    local file = io.open(path, "r")
    if not file then
        return ""
    end
    local line = file:read("*l")
    file:close()
    return line or ""
end

-- Seconds since the service has said what is in the file. On the machine that wrote it, its clock does not matter.
local function age_of(written, uptime, boot)
    if first_line("/proc/sys/kernel/random/boot_id") == boot then
        return (tonumber(first_line("/proc/uptime"):match("^%S+")) or 0) - uptime
    end
    return os.time() - written
end

-- The text, or nil and why it is of no use.
function cachefs.hints()
    local file = io.open(cachefs.file, "r")
    if not file then
        return nil, "no file " .. cachefs.file
    end
    local text = file:read(MOST_BYTES) or ""
    file:close()
    local written, uptime, boot, lasts = text:match(
        "^cachefs%-hints 1\nwritten (%d+) ([%d.]+) (%S+)\nlasts (%d+)\n")
    if not written or text:sub(-5) ~= "\nend\n" then
        return nil, cachefs.file .. " is no hint file"
    end
    local age = age_of(tonumber(written), tonumber(uptime), boot)
    if age > tonumber(lasts) or age < -5 then
        return nil, string.format("%s is %.0f s old; does cachefs-slurm-hint run, and its service?", cachefs.file, age)
    end
    return text
end

local function escaped(text)
    return (text:gsub("%W", "%%%0"))
end

-- { {level, nodes that have it}, ... }, the best level first; each has the nodes of those before it, and more.
local function levels(hints, name, partition)
    local line = hints:match("\nset " .. escaped(name) .. " " .. escaped(partition) .. " ([^\n]*)")
        or hints:match("\nset " .. escaped(name) .. " %* ([^\n]*)")
    local found = {}
    for level, count in (line or ""):gmatch("(%w+)=(%d+)") do
        found[#found + 1] = { level, tonumber(count) }
    end
    return found
end

-- ---- what is preferred -----------------------------------------------------------------------------------------------

-- A constraint that only says "all of these"; nil where it says more. Slurm takes a comma as "and".
function cachefs.plain(constraint)
    local joined = constraint:gsub(",", "&")
    for word in (joined .. "&"):gmatch("([^&]*)&") do
        if not word:match("^[%w_.:=-]+$") then
            return nil
        end
    end
    return joined
end

-- What to prefer for a job on so many nodes; nil: nothing. `--prefer` replaces the constraint while it is tried, so the
-- constraint is in it.
function cachefs.expression(hints, name, partition, nodes, constraint)
    local all = levels(hints, name, partition)
    local widest = all[#all]
    if not widest or widest[2] == 0 then
        return nil
    end
    local function feature(level)
        return "cachefs_" .. name .. "_" .. level[1]
    end
    if constraint ~= "" then
        local words = cachefs.plain(constraint)
        if not words or widest[2] < nodes then
            return nil
        end
        -- Who meets the constraint is not known here: a level with some choice.
        local chosen = widest
        for i = #all, 1, -1 do
            if all[i][2] >= 4 * nodes then
                chosen = all[i]
            end
        end
        return words .. "&" .. feature(chosen)
    end
    if widest[2] < nodes then
        return feature(widest) .. "*" .. widest[2]
    end
    local options = {}
    for i = 1, #all do
        local last = options[#options]
        if all[i][2] >= nodes and (not last or all[i][2] > last[2]) then
            if #options == MOST_OPTIONS then
                options[#options] = all[i]
            else
                options[#options + 1] = all[i]
            end
        end
    end
    for i = 1, #options do
        options[i] = feature(options[i])
    end
    -- In brackets, Slurm takes the first for which there is room, and all nodes of the job have that one.
    return #options == 1 and options[1] or "[" .. table.concat(options, "|") .. "]"
end

local function is_number(value)
    return type(value) == "number" and value < 4294967290   -- NO_VAL, INFINITE
end

-- How many nodes a job needs at least.
local function nodes_of(job_desc, hints)
    local nodes = is_number(job_desc.min_nodes) and job_desc.min_nodes or 1
    local cpus = tonumber(hints:match("\ncpus (%d+)\n")) or 0
    if cpus > 0 and is_number(job_desc.min_cpus) then
        nodes = math.max(nodes, math.ceil(job_desc.min_cpus / cpus))
    end
    return math.max(1, nodes)
end

local function empty(text)
    return text == nil or text == ""
end

-- ---- job_submit ------------------------------------------------------------------------------------------------------

-- The job waits until cachefs-slurm-hint lets it go. Its begin time is renewed meanwhile, so that it starts where nobody
-- does that any more; or it is held, where the configuration says so.
local function make_wait(job_desc, hints, tag)
    local how, seconds = hints:match("\nwait (%a+) (%d+)\n")
    if job_desc.priority == 0 then
        return tag   -- the user holds it
    elseif how == "hold" then
        job_desc.priority = 0
        return tag .. ",held=yes"
    elseif how == "begin" then
        local wished = job_desc.begin_time or 0
        if wished > 0 then
            tag = string.format("%s,begin=%.0f", tag, wished)
        end
        job_desc.begin_time = math.max(wished, os.time() + tonumber(seconds))
    end
    return tag
end

local function environment_of(job_desc)
    return function(name)
        local found, value = pcall(function() return job_desc.environment[name] end)
        return found and value or nil
    end
end

local function submit(job_desc)
    local wish = cachefs.wish(job_desc.script, environment_of(job_desc), job_desc.comment)
    if wish.problem then
        slurm.log_user("cachefs: %s; the job is taken as it is", wish.problem)
        return
    elseif not wish.dataset then
        return
    end
    local tag = "cachefs:" .. wish.dataset .. ",policy=" .. wish.policy
    if wish.jobs then
        tag = tag .. ",max-jobs-per-copy=" .. wish.jobs
    end
    local hints, why = cachefs.hints()
    if not hints then
        slurm.log_info("cachefs: no hint for a job that reads %s: %s", wish.dataset, why)
    else
        if wish.policy == "suspend" then
            tag = make_wait(job_desc, hints, tag)
        end
        local choice = empty(job_desc.prefer) and empty(job_desc.req_nodes) and empty(job_desc.batch_features)
        if choice and hints:find("\nsteer yes\n", 1, true) then
            local partition = (job_desc.partition or ""):match("^[^,]+") or "-"
            local prefer = cachefs.expression(hints, wish.dataset:match("^[^@]+"), partition,
                                              nodes_of(job_desc, hints), job_desc.features or "")
            if prefer and #prefer <= MOST_PREFER then
                job_desc.prefer = prefer
            end
        end
    end
    -- Where cachefs-slurm-hint finds what the job reads.
    job_desc.admin_comment = empty(job_desc.admin_comment) and tag or job_desc.admin_comment .. " " .. tag
end

-- Call this from slurm_job_submit. It never raises an error, and never refuses a job.
function cachefs.job_submit(job_desc)
    local done, problem = pcall(submit, job_desc)
    if not done then
        slurm.log_error("cachefs: a job is taken as it is: %s", tostring(problem))
    end
end

-- ---- cli_filter ------------------------------------------------------------------------------------------------------

local function filter(options)
    -- What is wrong with a comment is said by job_submit, which sees no environment of srun.
    local problem = cachefs.wish("", os.getenv, "").problem
    if problem then
        slurm.log_info("cachefs: " .. problem .. "; the job is taken as it is")
    end
    local wish = cachefs.wish("", os.getenv, options["comment"])
    if not wish.dataset or wish.problem then
        return
    end
    -- Only batch jobs bring their environment to the controller, so it is said in the comment.
    if empty(options["comment"]) then
        local words = "cachefs:" .. wish.dataset .. ",policy=" .. wish.policy
        options["comment"] = words .. (wish.jobs and ",max-jobs-per-copy=" .. wish.jobs or "")
    end
    local hints = cachefs.hints()
    if not hints or not hints:find("\nsteer yes\n", 1, true) then
        return
    end
    if empty(options["prefer"]) and empty(options["nodelist"]) and empty(options["batch"]) then
        local nodes = tonumber((options["nodes"] or ""):match("^%d+")) or 1
        local prefer = cachefs.expression(hints, wish.dataset:match("^[^@]+"), options["partition"] or "-",
                                          math.max(1, nodes), options["constraint"] or "")
        if prefer and #prefer <= MOST_PREFER then
            options["prefer"] = prefer
        end
    end
end

-- Call this from slurm_cli_pre_submit.
function cachefs.cli_filter(options)
    local done, problem = pcall(filter, options)
    if not done then
        slurm.log_debug("cachefs: a job is taken as it is: %s", tostring(problem))
    end
end

return cachefs
