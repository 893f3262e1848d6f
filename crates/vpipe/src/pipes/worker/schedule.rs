// SPDX-License-Identifier: Apache-2.0
//! Steps all pipes in turn, and sleeps until one can go on.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_proto::pipe::PipeId;

use super::super::pipe::{Next, Pipe, Wait};
use super::{MAX_SLEEP, Worker};
use crate::Flow;

impl Worker {
    /// One step of each pipe that can go on; progress replies; timeouts.
    pub(super) fn step_all(&mut self) {
        let now = Instant::now();
        for (id, (pipe, wait)) in std::mem::take(&mut self.pipes) {
            let waits = matches!(wait, Wait::Source | Wait::Sink) && !pipe.is_late(now);
            if waits || self.pause_watch.is_paused() {
                self.pipes.insert(id, (pipe, wait));
                continue;
            }
            let flows = pipe.flows();
            let next = pipe.step(now, self.resources.return_path(), &self.rate_limit);
            self.apply(now, id, flows, next);
        }
        let progress: Vec<_> = (self.pipes.values_mut())
            .filter_map(|(pipe, _)| pipe.progress(now))
            .collect();
        for message in progress {
            self.reply(message);
        }
        let late = |(id, returned): (&PipeId, &super::ReturnedConnections)| {
            returned.is_late(now).then_some(*id)
        };
        while let Some(id) = self.returned.iter().find_map(late) {
            if let Some(returned) = self.returned.remove(&id) {
                returned.reset(&mut self.resources);
            }
        }
        while let Some(id) = (self.held.iter()).find_map(|(id, h)| h.is_late(now).then_some(*id)) {
            self.release_held(id);
            self.refuse(id, "the agent did not start the pipe in time".into());
        }
    }

    /// Keeps a pipe that goes on, or ends it. `flows` are the connections before the step.
    fn apply(&mut self, now: Instant, id: PipeId, flows: Vec<Flow>, next: (Option<Pipe>, Next)) {
        match next {
            (Some(pipe), Next::Again(wait)) => {
                let kept = pipe.flows();
                for flow in flows.iter().filter(|flow| !kept.contains(flow)) {
                    self.forget(flow);
                }
                self.pipes.insert(id, (pipe, wait));
            }
            (_, ended) => self.end_pipe(now, id, flows, ended),
        }
    }

    /// Sleeps until an order, a packet or a socket wakes the thread, or a timeout is due.
    pub(super) fn sleep(&mut self) {
        let mut limit = MAX_SLEEP;
        let mut fds = vec![PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
        if self.holds_packets() {
            let queue = self.resources.hold_queue.fd();
            fds.push(PollFd::from_borrowed_fd(queue, PollFlags::IN));
        }
        let first = fds.len();
        let mut waiting = Vec::new();
        // while the VM is paused its pipes do nothing, whatever happens at their sockets
        let pipes = (self.pipes.iter()).filter(|_| self.paused_since.is_none());
        for (id, (pipe, wait)) in pipes {
            match wait {
                Wait::Nothing => {
                    limit = Duration::ZERO;
                    continue;
                }
                Wait::Time(pause) => limit = limit.min(*pause),
                Wait::Source | Wait::Sink => {}
            }
            for (socket, is_source) in pipe.sockets() {
                // poll reports errors and hang-ups in any case
                let flags = match (wait, is_source) {
                    (Wait::Source, true) => PollFlags::IN,
                    (Wait::Sink, false) => PollFlags::OUT,
                    _ => PollFlags::empty(),
                };
                waiting.push((*id, is_source));
                fds.push(PollFd::from_borrowed_fd(socket, flags));
            }
        }
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        // an interrupted sleep only ends early
        let _ = poll(&mut fds, Some(&limit));
        let ready: Vec<(PipeId, bool, PollFlags)> = (waiting.into_iter())
            .zip(fds[first..].iter().map(PollFd::revents))
            .filter(|(_, flags)| !flags.is_empty())
            .map(|((id, is_source), flags)| (id, is_source, flags))
            .collect();
        drop(fds);
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        let now = Instant::now();
        for (id, is_source, flags) in ready {
            if flags.intersects(PollFlags::ERR | PollFlags::HUP) {
                if let Some((pipe, _)) = self.pipes.remove(&id) {
                    let flows = pipe.flows();
                    let next = pipe.end_failed(is_source);
                    self.apply(now, id, flows, next);
                }
            } else if let Some((_, wait)) = self.pipes.get_mut(&id) {
                *wait = Wait::Nothing;
            }
        }
    }
}
