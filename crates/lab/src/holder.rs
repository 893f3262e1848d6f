// SPDX-License-Identifier: Apache-2.0
//! The thread that holds a lab's network namespace and is the parent of its guests.
//!
//! The namespace is a new one, or that of a [`crate::NetnsHost`]. It has no name: the kernel
//! removes it with its last process. Guests ask the kernel to kill them when their parent *thread*
//! ends, so only this thread starts them.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::error::{Error, Result};
use crate::net;
use crate::spec::Spec;

type Job = Box<dyn FnOnce() + Send>;

pub(crate) struct Holder {
    lab: String,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    netns: OwnedFd,
    path: PathBuf,
}

impl Holder {
    /// Starts the thread. Creates a namespace, or enters `at`, and sets up the bridges and NICs of
    /// `spec` there.
    pub(crate) fn start(spec: &Spec, at: Option<BorrowedFd<'_>>) -> Result<Self> {
        let at = at
            .map(|netns| netns.try_clone_to_owned())
            .transpose()
            .map_err(Error::net("keeping its namespace"))?;
        let (jobs, todo) = channel::<Job>();
        let (ready, made) = channel();
        let spec_of_thread = spec.clone();
        let thread = std::thread::Builder::new()
            .name("viola-lab".into())
            .spawn(move || {
                let made = make_namespace(&spec_of_thread, at);
                let failed = made.is_err();
                let _ = ready.send(made);
                while !failed && let Ok(job) = todo.recv() {
                    job();
                }
            })
            .map_err(Error::net("starting the holder thread"))?;
        let (netns, path) = made.recv().map_err(|_| Error::Ended(spec.name.clone()))??;
        Ok(Self {
            lab: spec.name.clone(),
            jobs: Some(jobs),
            thread: Some(thread),
            netns,
            path,
        })
    }

    /// Runs a job on the holder thread and returns its result.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let gone = || Error::Ended(self.lab.clone());
        let (send, result) = channel();
        let job: Job = Box::new(move || drop(send.send(job())));
        self.jobs
            .as_ref()
            .ok_or_else(gone)?
            .send(job)
            .map_err(|_| gone())?;
        result.recv().map_err(|_| gone())
    }

    pub(crate) fn netns(&self) -> &OwnedFd {
        &self.netns
    }

    /// Path of the namespace, valid while this thread lives.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn make_namespace(spec: &Spec, at: Option<OwnedFd>) -> Result<(OwnedFd, PathBuf)> {
    match at {
        // SAFETY: only this thread gets a new network namespace; it unshares no descriptors.
        None => unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
            .map_err(|e| Error::net("creating a network namespace (needs root)")(e.into()))?,
        Some(at) => move_into_link_name_space(at.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|e| Error::net("entering its namespace")(e.into()))?,
    }
    let path = "/proc/thread-self/ns/net";
    let netns = File::open(path).map_err(Error::io("open", path))?;
    net::build(spec)?;
    let (pid, tid) = (rustix::process::getpid(), rustix::thread::gettid());
    Ok((
        netns.into(),
        format!("/proc/{pid}/task/{tid}/ns/net").into(),
    ))
}

/// Runs `job` on a fresh thread inside the network namespace.
pub(crate) fn in_netns<T: Send>(netns: &OwnedFd, job: impl FnOnce() -> T + Send) -> Result<T> {
    viola_netdev::in_netns(netns.as_fd(), job).map_err(Error::net("entering its namespace"))
}
