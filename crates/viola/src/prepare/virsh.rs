// SPDX-License-Identifier: Apache-2.0
//! `virsh`, libvirt's own command: descriptions of domains, and devices that are plugged.

use std::ffi::OsString;
use std::io::Write;
use std::process::{Command, Stdio};

use viola_cli::error::{Failure, Outcome};
use viola_cli::quantities::quoted;
use viola_host::libvirt::URI;

/// libvirt by its command.
#[derive(Debug, Clone)]
pub struct Virsh {
    program: OsString,
}

/// How `virsh` begins when libvirt has no such domain.
const NO_DOMAIN: &str = "failed to get domain";

impl Default for Virsh {
    fn default() -> Self {
        Self {
            program: "virsh".into(),
        }
    }
}

impl Virsh {
    #[cfg(test)]
    pub fn new(program: impl Into<OsString>) -> Self {
        Self {
            program: program.into(),
        }
    }

    /// What libvirt keeps of the domain, with its secrets, so that nothing is lost when it is written back.
    ///
    /// # Errors
    /// There is no such domain, or libvirt keeps nothing of it.
    pub fn domain(&self, vm: &str) -> Outcome<String> {
        let info = self.run(&["dominfo", "--domain", vm], None);
        let info = info.map_err(|e| match e.contains(NO_DOMAIN) {
            true => Failure::usage(format!(
                "libvirt has no VM {}; `virsh list --all` lists those it has. For other VMs the page of the accelerator says what \
                 QEMU's command line needs",
                quoted(vm)
            )),
            false => Failure::run(e),
        })?;
        let keeps = info.lines().find_map(|l| l.strip_prefix("Persistent:"));
        if keeps.is_some_and(|value| value.trim() == "no") {
            return Err(Failure::run(format!(
                "libvirt forgets VM {} when it stops; prepare it where its description comes from",
                quoted(vm)
            )));
        }
        self.run(
            &["dumpxml", "--domain", vm, "--inactive", "--security-info"],
            None,
        )
        .map_err(Failure::run)
    }

    /// The domain of the VM's process; `None` if it has none.
    ///
    /// # Errors
    /// libvirt's reason.
    pub fn live(&self, vm: &str) -> Outcome<Option<String>> {
        let id = self
            .run(&["domid", "--domain", vm], None)
            .map_err(Failure::run)?;
        if id.trim() == "-" {
            return Ok(None);
        }
        let xml = self.run(&["dumpxml", "--domain", vm], None);
        xml.map(Some).map_err(Failure::run)
    }

    /// Replaces what libvirt keeps of a domain.
    pub fn define(&self, xml: &str) -> Outcome {
        let done = self.run(&["define", "--file", "/dev/stdin"], Some(xml));
        done.map(drop).map_err(|e| {
            Failure::run(format!(
                "libvirt refuses the change, so nothing was changed: {e}"
            ))
        })
    }

    /// Plugs a device into a running VM.
    ///
    /// # Errors
    /// libvirt's reason.
    pub fn attach(&self, vm: &str, device: &str) -> Result<(), String> {
        self.plug("attach-device", vm, device)
    }

    /// Unplugs a device of a running VM.
    ///
    /// # Errors
    /// libvirt's reason.
    pub fn detach(&self, vm: &str, device: &str) -> Result<(), String> {
        self.plug("detach-device", vm, device)
    }

    fn plug(&self, command: &str, vm: &str, device: &str) -> Result<(), String> {
        let args = [command, "--domain", vm, "--file", "/dev/stdin", "--live"];
        self.run(&args, Some(device)).map(drop)
    }

    /// What the command prints; on failure what it says.
    fn run(&self, args: &[&str], input: Option<&str>) -> Result<String, String> {
        let shown = self.program.to_string_lossy().into_owned();
        let failed = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => format!(
                "{shown} is missing; install libvirt's commands (package libvirt-clients or libvirt-client)"
            ),
            _ => format!("{shown}: {e}"),
        };
        let mut command = Command::new(&self.program);
        command
            .args(["--quiet", "--connect", URI])
            .args(args)
            .env("LC_ALL", "C");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take()
            && let Some(input) = input
        {
            // One that ends without reading says why itself.
            let _ = stdin.write_all(input.as_bytes());
        }
        let output = child.wait_with_output().map_err(failed)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        // The last sentence has the reason, after what failed.
        let reasons = said.lines().map(|l| l.trim_start_matches("error: ").trim());
        let reasons: Vec<&str> = reasons.filter(|l| !l.is_empty()).collect();
        Err(match reasons.as_slice() {
            [] => format!("{shown} {}: {}", args.first().unwrap_or(&""), output.status),
            reasons => reasons.join(": "),
        })
    }
}
