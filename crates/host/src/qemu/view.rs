// SPDX-License-Identifier: Apache-2.0
//! QMP's answers in terms of the host's threads.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::qmp::{QmpError, QmpFailure};
use super::state::{self, QemuState};
use crate::error::HostError;
use crate::paths::through_root;
use crate::proc;
use crate::thread::{Thread, Tid};
use crate::vm::Disk;

/// An answer of QMP in terms of the host's threads.
#[derive(PartialEq, Eq)]
pub(super) struct View {
    pub(super) name: Option<String>,
    pub(super) status: String,
    pub(super) vcpus: Vec<(u32, Thread)>,
    pub(super) iothreads: Vec<Thread>,
    pub(super) disks: Vec<Disk>,
}

/// Queries the VM over one QMP socket.
pub(super) fn query_socket(
    vm: &str,
    pid: Tid,
    socket: &str,
    threads: &[(Thread, String)],
) -> Result<Result<View, QmpError>, HostError> {
    let failed = |cause| QmpError {
        vm: vm.to_owned(),
        socket: PathBuf::from(socket),
        cause,
    };
    if proc::unix_sockets::has_client(pid, socket)? {
        return Ok(Err(failed(QmpFailure::Busy)));
    }
    let answer = match state::query(vm, Path::new(socket), &through_root(pid, socket), pid) {
        Ok(answer) => answer,
        Err(e) => return Ok(Err(e)),
    };
    let numbers = thread_numbers(pid, threads)?;
    Ok(view_of(answer, &numbers).map_err(failed))
}

/// Threads by their number in the VM's own PID namespace: in a container it differs from the host's.
fn thread_numbers(
    pid: Tid,
    threads: &[(Thread, String)],
) -> Result<HashMap<Tid, Thread>, HostError> {
    let is_contained = proc::inner_tid(pid)?.is_some_and(|inner| inner != pid);
    let mut numbers = HashMap::new();
    for (thread, _) in threads {
        let inner = if is_contained {
            proc::inner_tid(thread.tid)?
        } else {
            Some(thread.tid)
        };
        numbers.extend(inner.map(|inner| (inner, *thread)));
    }
    Ok(numbers)
}

/// Accepts only threads of the VM's own process: the server behind the socket cannot make viola change any other.
fn view_of(answer: QemuState, numbers: &HashMap<Tid, Thread>) -> Result<View, QmpFailure> {
    let thread = |tid: Tid| {
        let foreign =
            || QmpFailure::Malformed(format!("it names thread {tid}, which is not the VM's"));
        numbers.get(&tid).copied().ok_or_else(foreign)
    };
    Ok(View {
        name: answer.name,
        status: answer.status,
        vcpus: answer
            .vcpus
            .into_iter()
            .map(|(index, tid)| Ok((index, thread(tid)?)))
            .collect::<Result<_, QmpFailure>>()?,
        iothreads: answer
            .iothreads
            .into_iter()
            .map(thread)
            .collect::<Result<_, QmpFailure>>()?,
        disks: answer.disks,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tid: Tid) -> Thread {
        Thread {
            pid: 10,
            tid,
            start_time: 5,
        }
    }

    #[test]
    fn an_answer_cannot_name_a_thread_of_another_process() {
        let numbers = HashMap::from([(11, thread(11))]);
        let answer = |tid| QemuState {
            vcpus: vec![(0, tid)],
            ..QemuState::default()
        };
        assert!(view_of(answer(11), &numbers).is_ok());
        let error = view_of(answer(1), &numbers).err().unwrap();
        assert!(error.to_string().contains("thread 1,"), "{error}");
    }
}
