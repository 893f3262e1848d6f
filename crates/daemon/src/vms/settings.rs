// SPDX-License-Identifier: Apache-2.0
//! What holds for each VM, and who said so: `viola set`, the kept settings, the configuration, the VM's control
//! group, or nobody.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viola_host::Vm;
use viola_policy::slices::DEFAULT_WEIGHT;
use viola_proto::lanes::{LaneChange, LaneSetting};
use viola_proto::{Change, ClassSetting, Source};

use viola_cli::quantities::{self, DEFAULT_MICROSLICE};
use viola_config::Config;

/// Name of the file in `state_dir`.
const NAME: &str = "settings.json";

/// What somebody said about a VM; what is absent was left to others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Said {
    /// Class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<ClassSetting>,
    /// Microslice, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microslice_ns: Option<u64>,
    /// Weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap: Option<Cap>,
    /// Whether it may have a VF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<LaneSetting>,
}

/// A cap, or that there is to be none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cap {
    /// Lifted.
    None,
    /// Thousandths of one core.
    Permille(u32),
}

impl Cap {
    fn of(cap: Option<u32>) -> Self {
        cap.map_or(Self::None, Self::Permille)
    }

    fn permille(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Permille(p) => Some(p),
        }
    }
}

impl Said {
    fn over(self, below: Self) -> Self {
        Self {
            class: self.class.or(below.class),
            microslice_ns: self.microslice_ns.or(below.microslice_ns),
            weight: self.weight.or(below.weight),
            cap: self.cap.or(below.cap),
            lane: self.lane.or(below.lane),
        }
    }
}

/// A value and who said it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct From<T> {
    /// The value.
    pub value: T,
    /// Where it comes from.
    pub source: Source,
}

/// What holds for one VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Controls {
    /// Class asked for.
    pub class: From<ClassSetting>,
    /// Microslice, ns.
    pub microslice: From<u64>,
    /// Weight, 1..=65535.
    pub weight: From<u32>,
    /// Cap of all vCPUs together, thousandths of one core; the lower one of what was asked for and of the
    /// control group's quota.
    pub cap: From<Option<u32>>,
    /// Quota of each vCPU from the control group, thousandths of one core.
    pub vcpu_quota: Option<u32>,
}

impl Controls {
    /// Whether viola has to enforce a cap that the kernel would not.
    pub fn capped_by_viola(&self) -> bool {
        self.cap.value.is_some() && self.cap.source != Source::Cgroup
    }
}

/// All settings.
#[derive(Debug)]
pub struct Settings {
    file: PathBuf,
    kept: BTreeMap<String, Said>,
    live: BTreeMap<String, Said>,
}

/// The file of kept settings.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    vms: BTreeMap<String, Said>,
}

impl Settings {
    /// Reads the kept settings. A file that makes no sense is set aside, with a sentence about it.
    pub fn read(state_dir: &Path) -> (Self, Option<String>) {
        let file = state_dir.join(NAME);
        let (kept, warning) = match fs::read(&file) {
            Ok(bytes) => match serde_json::from_slice::<Kept>(&bytes) {
                Ok(kept) => (kept, None),
                Err(e) => {
                    let aside = file.with_extension("damaged");
                    let moved = match fs::rename(&file, &aside) {
                        Ok(()) => format!("it is now {}", aside.display()),
                        Err(e) => format!("and cannot be set aside: {e}"),
                    };
                    let warning =
                        format!("{} holds no kept settings ({e}); {moved}", file.display());
                    (Kept::default(), Some(warning))
                }
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => (Kept::default(), None),
            Err(e) => (
                Kept::default(),
                Some(format!("{}: {e}; no kept setting holds", file.display())),
            ),
        };
        (
            Self {
                file,
                kept: kept.vms,
                live: BTreeMap::new(),
            },
            warning,
        )
    }

    /// What holds for a VM.
    pub fn controls(&self, config: &Config, vm: &Vm) -> Controls {
        let id = vm.id.as_str();
        let live = self.live.get(id).copied().unwrap_or_default();
        let kept = self.kept.get(id).copied().unwrap_or_default();
        let file = config.vm(id, &vm.name).map_or(Said::default(), |v| Said {
            class: v.class,
            microslice_ns: v.microslice,
            weight: v.weight,
            cap: v.cap.map(Cap::of),
            lane: None,
        });
        let layers = [
            (live, Source::Set),
            (kept, Source::Kept),
            (file, Source::Config),
        ];
        let group = vm.cgroup.as_ref();
        let class = first(&layers, |s| s.class).unwrap_or(From {
            value: if config.slices.auto {
                ClassSetting::Auto
            } else {
                ClassSetting::Batch
            },
            source: Source::Default,
        });
        let microslice = first(&layers, |s| s.microslice_ns).unwrap_or(From {
            value: DEFAULT_MICROSLICE,
            source: Source::Default,
        });
        let weight = first(&layers, |s| s.weight)
            .or_else(|| {
                group.and_then(|g| g.weight).map(|w| From {
                    value: w.clamp(1, 65_535),
                    source: Source::Cgroup,
                })
            })
            .unwrap_or(From {
                value: DEFAULT_WEIGHT,
                source: Source::Default,
            });
        // A cap that the VM cannot reach is none (the configuration is read before its cores are known).
        let most = usable_cores(vm) as u64 * 1000;
        let asked = first(&layers, |s| s.cap).map(|c| From {
            value: c.value.permille().filter(|&p| u64::from(p) < most),
            source: c.source,
        });
        let quota = group.and_then(|g| g.quota_permille_of_one_core);
        let cap = match (asked, quota) {
            (
                Some(From {
                    value: Some(cap),
                    source,
                }),
                q,
            ) if q.is_none_or(|q| cap <= q) => From {
                value: Some(cap),
                source,
            },
            (_, Some(q)) => From {
                value: Some(q.max(1)),
                source: Source::Cgroup,
            },
            (asked, None) => asked.unwrap_or(From {
                value: None,
                source: Source::Default,
            }),
        };
        let vcpu_quota = group.and_then(|g| g.vcpu_quota_permille);
        Controls {
            class,
            microslice,
            weight,
            cap,
            vcpu_quota,
        }
    }

    /// Checks a change and carries it out; on error nothing was changed. `keep` is not allowed in a dry run.
    pub fn change(&mut self, vm: &Vm, change: &Change) -> Result<(), String> {
        let said = read(vm, change)?;
        let id = vm.id.to_string();
        if change.keep && id.ends_with(&format!("@{}", vm.pid)) {
            return Err(format!(
                "{id} shares its name with another VM, so a kept setting would not find it again; give it a name of its own"
            ));
        }
        let mut kept = self.kept.clone();
        if change.reset {
            kept.remove(&id);
        }
        if change.keep {
            // What was set live before is meant as well: the VM is to be after a restart as it is now.
            let live = if change.reset {
                Said::default()
            } else {
                self.live.get(&id).copied().unwrap_or_default()
            };
            let below = kept.get(&id).copied().unwrap_or_default();
            kept.insert(id.clone(), said.over(live).over(below));
        }
        self.keep(kept)?;
        if change.reset || change.keep {
            self.live.remove(&id);
        }
        if !change.keep && said != Said::default() {
            let entry = self.live.entry(id).or_default();
            *entry = said.over(*entry);
        }
        Ok(())
    }
}

impl Settings {
    /// Has this survive a restart.
    fn keep(&mut self, kept: BTreeMap<String, Said>) -> Result<(), String> {
        if kept != self.kept {
            write(&self.file, &kept).map_err(|e| {
                format!(
                    "{} cannot be written ({e}); nothing was changed",
                    self.file.display()
                )
            })?;
            self.kept = kept;
        }
        Ok(())
    }

    /// What was said about VFs, by the identities of guests.
    pub fn lanes(&self) -> BTreeMap<String, (LaneSetting, Source)> {
        let of = |said: &BTreeMap<String, Said>, source: Source| -> Vec<_> {
            let lane = |(id, said): (&String, &Said)| Some((id.clone(), (said.lane?, source)));
            said.iter().filter_map(lane).collect()
        };
        let kept = of(&self.kept, Source::Kept).into_iter();
        kept.chain(of(&self.live, Source::Set)).collect()
    }

    /// Changes whether a guest may have a VF; what holds now, unless it is the configuration's word.
    pub fn change_lane(
        &mut self,
        id: &str,
        change: LaneChange,
    ) -> Result<Option<(LaneSetting, Source)>, String> {
        if change.lane.is_none() && !change.reset {
            return Err("nothing is to be changed; name lane or reset".into());
        }
        let mut kept = self.kept.clone();
        if change.reset
            && let Some(said) = kept.get_mut(id)
        {
            said.lane = None;
        }
        if change.keep {
            kept.entry(id.to_owned()).or_default().lane = change.lane;
        }
        kept.retain(|_, said| *said != Said::default());
        self.keep(kept)?;
        let live = self.live.entry(id.to_owned()).or_default();
        live.lane = match change.keep {
            true => None,
            false => change.lane,
        };
        Ok(self.lanes().get(id).copied())
    }
}

/// The first that was said, from above.
fn first<T>(layers: &[(Said, Source); 3], get: impl Fn(&Said) -> Option<T>) -> Option<From<T>> {
    layers.iter().find_map(|(said, source)| {
        get(said).map(|value| From {
            value,
            source: *source,
        })
    })
}

/// Cores that a VM can keep busy.
pub fn usable_cores(vm: &Vm) -> usize {
    vm.vcpus.len().min(vm.cores.len()).max(1)
}

fn read(vm: &Vm, change: &Change) -> Result<Said, String> {
    let sentence = |key: &str| {
        let key = key.to_owned();
        move |e: quantities::BadQuantity| format!("{key}: {e}")
    };
    let microslice_ns = match &change.microslice {
        Some(t) => Some(
            quantities::duration_in(t, &quantities::MICROSLICE).map_err(sentence("microslice"))?,
        ),
        None => None,
    };
    let weight = change
        .weight
        .map(quantities::weight)
        .transpose()
        .map_err(sentence("weight"))?;
    let cap = match &change.cap {
        Some(t) => {
            let cap = quantities::cap(t).map_err(sentence("cap"))?;
            if let Some(p) = cap {
                quantities::cap_fits(p, usable_cores(vm), &vm.name).map_err(|e| e.to_string())?;
            }
            Some(Cap::of(cap))
        }
        None => None,
    };
    let said = Said {
        class: change.class,
        microslice_ns,
        weight,
        cap,
        lane: None,
    };
    if said == Said::default() && !change.reset && !change.keep {
        return Err(
            "nothing is to be changed; name class, microslice, weight, cap or reset".into(),
        );
    }
    Ok(said)
}

/// Writes the file as a whole, and to the disk before it takes the old one's place.
fn write(file: &Path, vms: &BTreeMap<String, Said>) -> io::Result<()> {
    let dir = file.parent().unwrap_or(Path::new("/"));
    crate::host::lock::make_dir(dir, 0o700)?;
    let temporary = file.with_extension("new");
    let json = serde_json::to_vec_pretty(&Kept { vms: vms.clone() })?;
    let mut out = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    out.write_all(&json)?;
    out.sync_all()?;
    fs::rename(&temporary, file)?;
    fs::File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests;
