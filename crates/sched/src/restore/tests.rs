// SPDX-License-Identifier: Apache-2.0
//! Saving and restoring real processes.

use std::io::Write;

use viola_host::{CpuSet, ServiceKind, Thread, Vm};

use super::*;

#[test]
fn an_absent_file_is_empty_and_a_damaged_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slots.json");
    assert_eq!(SavedState::read(&path).unwrap(), SavedState::default());
    fs::write(&path, b"{\"vms\":").unwrap();
    let error = SavedState::read(&path).unwrap_err().to_string();
    assert!(
        error.contains("slots.json") && error.contains("chrt"),
        "{error}"
    );
}

#[test]
fn the_state_survives_the_file_without_leftovers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slots.json");
    let state = SavedState {
        processes: vec![(7, 8)],
        vms: Vec::new(),
    };
    state.write(&path).unwrap();
    assert_eq!(SavedState::read(&path).unwrap(), state);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// A sleeping process.
struct Sleeper(std::process::Child);

impl Sleeper {
    fn new() -> Self {
        let child = std::process::Command::new("sleep").arg("60").spawn();
        Self(child.unwrap())
    }

    fn thread(&self) -> Thread {
        let (pid, tid) = (self.0.id(), self.0.id());
        let start_time = proc::stat(pid).unwrap().unwrap().start_time;
        Thread {
            pid,
            tid,
            start_time,
        }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_that_works_for_a_vm_is_restored_after_the_vm_has_ended() {
    let (vm, backend) = (Sleeper::new(), Sleeper::new());
    let (main, worker) = (vm.thread(), backend.thread());
    let kind = ServiceKind::Backend;
    let thread = worker;
    let noted: Vm = serde_json::from_value(serde_json::json!({
        "id": "uml:x", "name": "x", "hypervisor": "uml",
        "pid": main.pid, "start_time": main.start_time,
        "vcpus": [{"index": 0, "threads": [main], "kernel_thread": null, "cores": CpuSet::new()}],
        "service": [viola_host::ServiceThread { thread, kind }],
        "disks": [], "nics": [], "cgroup": null, "cores": CpuSet::new(), "status": null
    }))
    .unwrap();
    let mut state = SavedState::default();
    state.record(&noted, false).unwrap();
    assert_eq!(state.vms[0].helpers, [(worker.pid, worker.start_time)]);
    // real-time classes need root
    if attrs::set(worker.tid, &SchedAttr::fifo(18)).is_err() {
        return;
    }
    drop(vm);
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 1);
    let now = attrs::get(worker.tid).unwrap().unwrap();
    assert_eq!(now.policy, SchedAttr::fair(0).policy);
}

#[test]
fn only_priorities_of_violas_are_restored() {
    assert!(is_ours(&SchedAttr::fifo(18)));
    assert!(!is_ours(&SchedAttr::fifo(50)));
    assert!(!is_ours(&SchedAttr::fair(0)));
}

/// A shell that stands for a VM. On request it makes a child that leaves its process tree.
struct Forker {
    shell: std::process::Child,
    orphan: Option<Tid>,
}

/// How the child leaves.
const DOUBLE_FORK: &str = "( sleep 60 >/dev/null 2>&1 & echo $! )";
const DOUBLE_FORK_AND_NEW_SESSION: &str = "( setsid sleep 60 >/dev/null 2>&1 & echo $! )";

impl Forker {
    /// `command` begins the command line, such as `setsid`.
    fn new(command: &[&str], fork: &str) -> Self {
        let script = format!("echo ready; read go; {fork}; read end");
        let line = [command, &["sh", "-c", &script]].concat();
        let mut shell = std::process::Command::new(line[0])
            .args(&line[1..])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        assert_eq!(read_line(&mut shell), "ready");
        Self {
            shell,
            orphan: None,
        }
    }

    fn vm(&self) -> Vm {
        let pid = self.shell.id();
        let start_time = proc::stat(pid).unwrap().unwrap().start_time;
        let main = Thread {
            pid,
            tid: pid,
            start_time,
        };
        let mounts = viola_host::cgroup::Mounts::read().unwrap();
        serde_json::from_value(serde_json::json!({
            "id": "uml:f", "name": "f", "hypervisor": "uml", "pid": pid, "start_time": start_time,
            "vcpus": [{"index": 0, "threads": [main], "kernel_thread": null, "cores": CpuSet::new()}],
            "service": [], "disks": [], "nics": [], "cgroup": mounts.of_vm(pid, &[]).unwrap(),
            "cores": CpuSet::new(), "status": null
        }))
        .unwrap()
    }

    /// Makes the shell real-time, then the orphan, and returns that; `None` without the right to.
    fn fork(&mut self, attr: &SchedAttr) -> Option<Tid> {
        let pid = self.shell.id();
        let _ = attrs::set(pid, attr).ok()?;
        writeln!(self.shell.stdin.as_mut().unwrap(), "go").unwrap();
        let orphan: Tid = read_line(&mut self.shell).parse().unwrap();
        self.orphan = Some(orphan);
        // Until the child in between, which is of the session too, has been reaped.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while proc::stat(orphan).unwrap().unwrap().comm != "sleep"
            || processes_of(pid).unwrap() != [pid]
        {
            assert!(std::time::Instant::now() < deadline);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Some(orphan)
    }

    fn end(&mut self) {
        self.shell.kill().unwrap();
        self.shell.wait().unwrap();
    }
}

impl Drop for Forker {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
        if let Some(pid) = self
            .orphan
            .and_then(|pid| rustix::process::Pid::from_raw(pid as i32))
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

fn read_line(shell: &mut std::process::Child) -> String {
    let mut line = Vec::new();
    let out = shell.stdout.as_mut().unwrap();
    let mut byte = [0];
    while std::io::Read::read(out, &mut byte).unwrap() == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

fn recorded(vm: &Vm) -> SavedState {
    let mut state = SavedState::default();
    state.record(vm, false).unwrap();
    state
}

fn policy(tid: Tid) -> Policy {
    attrs::get(tid).unwrap().unwrap().policy
}

#[test]
fn a_double_forked_child_in_the_vms_session_is_restored() {
    let mut forker = Forker::new(&["setsid"], DOUBLE_FORK);
    let vm = forker.vm();
    let state = recorded(&vm);
    assert_eq!(state.vms[0].own.session, Some(vm.pid));
    let Some(orphan) = forker.fork(&SchedAttr::fifo(18)) else {
        return;
    };
    assert_eq!(policy(orphan), Policy::Fifo);
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 2);
    assert_eq!(
        (policy(vm.pid), policy(orphan)),
        (Policy::Normal, Policy::Normal)
    );
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 0);
}

#[test]
fn a_child_is_restored_from_the_file_after_its_vm_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("slots.json");
    let mut forker = Forker::new(&["setsid"], DOUBLE_FORK);
    recorded(&forker.vm()).write(&file).unwrap();
    let Some(orphan) = forker.fork(&SchedAttr::fifo(18)) else {
        return;
    };
    forker.end();
    assert_eq!(policy(orphan), Policy::Fifo);
    let done = restore_file(&file).unwrap();
    assert_eq!((done.vms, done.threads), (1, 1));
    assert_eq!(policy(orphan), Policy::Normal);
    assert!(!file.exists());
}

/// A control group, removed when dropped. `None` on a host where this test cannot make one.
struct Group(PathBuf);

impl Group {
    fn new(name: &str) -> Option<Self> {
        let mounts = viola_host::cgroup::Mounts::read().ok()?;
        let root = mounts.folder(std::process::id(), "/").ok()??;
        let folder = root.join(format!("viola-test-{name}-{}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let group = Self(folder);
        let runtime = group.0.join("cpu.rt_runtime_us");
        if runtime.exists() {
            fs::write(runtime, "10000").ok()?;
        }
        Some(group)
    }

    fn take(&self, pid: Tid) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

#[test]
fn a_child_that_left_the_session_is_restored_by_the_vms_own_control_group() {
    let Some(group) = Group::new("own") else {
        eprintln!("not tried: no control group can be made here");
        return;
    };
    let foreign = Sleeper::new();
    let mut forker = Forker::new(&["env"], DOUBLE_FORK_AND_NEW_SESSION);
    group.take(forker.shell.id());
    let state = recorded(&forker.vm());
    assert_eq!(state.vms[0].own.cgroup.as_ref(), Some(&group.0));
    assert_eq!(state.vms[0].own.session, None);
    let Some(orphan) = forker.fork(&SchedAttr::fifo(18)) else {
        return;
    };
    // A process that began before viola recorded the VM has its priority from somebody else.
    let pid = foreign.thread().pid;
    group.take(pid);
    let _ = attrs::set(pid, &SchedAttr::fifo(18)).unwrap();
    if foreign.thread().start_time == state.vms[0].own.since {
        return;
    }
    forker.end();
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 1);
    assert_eq!(policy(orphan), Policy::Normal);
    assert_eq!(policy(pid), Policy::Fifo);
    drop((forker, foreign));
}

#[test]
fn a_group_with_other_processes_is_not_the_vms_own() {
    let Some(group) = Group::new("shared") else {
        return;
    };
    let (other, forker) = (Sleeper::new(), Forker::new(&["env"], DOUBLE_FORK));
    group.take(other.thread().pid);
    group.take(forker.shell.id());
    let own = recorded(&forker.vm()).vms[0].own.clone();
    assert_eq!((own.cgroup, own.session), (None, None));
    drop((forker, other));
}

#[test]
fn two_vms_in_one_group_have_none_of_their_own() {
    let Some(group) = Group::new("two") else {
        return;
    };
    let (first, second) = (
        Forker::new(&["setsid"], DOUBLE_FORK),
        Forker::new(&["setsid"], DOUBLE_FORK),
    );
    group.take(first.shell.id());
    let mut state = recorded(&first.vm());
    assert!(state.vms[0].own.cgroup.is_some());
    group.take(second.shell.id());
    state.record(&second.vm(), false).unwrap();
    assert!(state.vms.iter().all(|vm| vm.own.cgroup.is_none()));
    drop((first, second));
}

#[test]
fn a_child_that_the_controller_gave_a_priority_is_restored_wherever_it_is() {
    let mut forker = Forker::new(&["env"], DOUBLE_FORK_AND_NEW_SESSION);
    let vm = forker.vm();
    let mut state = recorded(&vm);
    assert_eq!(state.vms[0].own.session, None);
    let Some(orphan) = forker.fork(&SchedAttr::fifo(18)) else {
        return;
    };
    let foreign = Sleeper::new();
    let other = foreign.thread().tid;
    let _ = attrs::set(other, &SchedAttr::fifo(18)).unwrap();
    assert!(state.record_forked(vm.pid, orphan).unwrap());
    assert!(!state.record_forked(vm.pid, orphan).unwrap(), "listed");
    assert!(!state.record_forked(vm.pid, Tid::MAX / 2).unwrap(), "ended");
    assert!(!state.record_forked(1, orphan).unwrap(), "not a VM");
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 2);
    assert_eq!(policy(orphan), Policy::Normal);
    assert_eq!(policy(other), Policy::Fifo, "not a thread of the VM");
    forker.end();
    let pid = rustix::process::Pid::from_raw(orphan as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn a_new_thread_with_a_priority_of_violas_is_recorded_as_forked() {
    let forker = Forker::new(&["setsid"], DOUBLE_FORK);
    let mut vm = forker.vm();
    let mut state = recorded(&vm);
    let new = Sleeper::new();
    let thread = new.thread();
    vm.vcpus[0].threads.push(thread);
    // A thread may lower its priority; viola's own begin at 10.
    if attrs::set(thread.tid, &SchedAttr::fifo(5)).is_err() {
        return;
    }
    state.record(&vm, false).unwrap();
    assert_eq!(state.vms[0].forked, [(thread.tid, thread.start_time)]);
    assert_eq!(state.vms[0].threads.len(), 1);
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 1);
    assert_eq!(policy(thread.tid), Policy::Normal);
    drop(new);
    state.record(&vm, false).unwrap();
    assert_eq!(state.vms[0].forked, [], "a thread that has ended");
}

#[test]
fn a_lowered_priority_is_restored_and_an_operators_own_one_is_kept() {
    let forker = Forker::new(&["setsid"], DOUBLE_FORK);
    let vm = forker.vm();
    let state = recorded(&vm);
    if attrs::set(vm.pid, &SchedAttr::fifo(5)).is_err() {
        return;
    }
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 1);
    assert_eq!(policy(vm.pid), Policy::Normal);
    let _ = attrs::set(vm.pid, &SchedAttr::fifo(5)).unwrap();
    let state = recorded(&vm);
    let _ = attrs::set(vm.pid, &SchedAttr::fifo(18)).unwrap();
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 1);
    assert_eq!(attrs::get(vm.pid).unwrap(), Some(SchedAttr::fifo(5)));
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 0);
}

#[test]
fn reset_on_fork_is_cleared_and_keeps_children_out_of_the_real_time_class() {
    let mut forker = Forker::new(&["setsid"], DOUBLE_FORK);
    let vm = forker.vm();
    let state = recorded(&vm);
    let with_reset = SchedAttr {
        flags: attrs::RESET_ON_FORK,
        ..SchedAttr::fifo(18)
    };
    let Some(orphan) = forker.fork(&with_reset) else {
        return;
    };
    assert_eq!(policy(orphan), Policy::Normal);
    assert_eq!(restore_vm(&state.vms[0]).unwrap(), 1);
    assert_eq!(attrs::get(vm.pid).unwrap(), Some(state.vms[0].default));
}

#[test]
fn an_older_file_without_groups_is_read() {
    let vm: SavedVm = serde_json::from_value(serde_json::json!({
        "id": "uml:x", "pid": 7, "start_time": 8, "default": SchedAttr::fair(0),
        "affinity": CpuSet::new(), "pinned": false, "threads": []
    }))
    .unwrap();
    assert_eq!((vm.forked, vm.own), (Vec::new(), OwnGroups::default()));
}

#[test]
fn a_damaged_file_is_quoted_without_control_characters() {
    let file = br#"{"processes":[],"vms":[{"id":"x","pid":7,"start_time":8,"default":{"policy":"\u001b[2J\n"}}]}"#;
    let error = SavedState::parse(Path::new("slots.json"), file).unwrap_err();
    let said = error.to_string();
    assert!(said.contains("[2J"), "{said}");
    assert!(!said.contains(char::is_control), "{said:?}");
}
