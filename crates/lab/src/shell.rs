// SPDX-License-Identifier: Apache-2.0
//! The lab's end of a guest's shell. It always reads the line, and shows the output to the attached
//! client.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type Viewer = Arc<Mutex<Option<UnixStream>>>;

pub(crate) struct Shell {
    line: UnixStream,
    viewer: Viewer,
}

impl Shell {
    pub(crate) fn new(line: UnixStream) -> std::io::Result<Self> {
        let viewer = Viewer::default();
        let (mut input, theirs) = (line.try_clone()?, Arc::clone(&viewer));
        std::thread::Builder::new()
            .name("viola-lab-shell".into())
            .spawn(move || {
                let mut bytes = [0_u8; 4096];
                while let Ok(count) = input.read(&mut bytes)
                    && count > 0
                {
                    let mut viewer = lock(&theirs);
                    if viewer
                        .as_mut()
                        .is_some_and(|v| v.write_all(&bytes[..count]).is_err())
                    {
                        *viewer = None;
                    }
                }
                if let Some(viewer) = lock(&theirs).take() {
                    let _ = viewer.shutdown(std::net::Shutdown::Both);
                }
            })?;
        Ok(Self { line, viewer })
    }

    /// Connects `client` with the shell until the client closes or the guest ends.
    ///
    /// # Errors
    /// If another client is attached.
    pub(crate) fn attach(&self, client: &UnixStream) -> std::io::Result<()> {
        {
            let mut viewer = lock(&self.viewer);
            if viewer.is_some() {
                return Err(std::io::Error::other("another client uses its shell"));
            }
            *viewer = Some(client.try_clone()?);
        }
        let mut line = &self.line;
        let _ = line.write_all(b"\r"); // a fresh prompt
        let mut bytes = [0_u8; 4096];
        let mut client = client;
        while let Ok(count) = client.read(&mut bytes)
            && count > 0
            && line.write_all(&bytes[..count]).is_ok()
        {}
        *lock(&self.viewer) = None;
        Ok(())
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.line.shutdown(std::net::Shutdown::Both);
    }
}

fn lock(viewer: &Viewer) -> MutexGuard<'_, Option<UnixStream>> {
    viewer.lock().unwrap_or_else(PoisonError::into_inner)
}
