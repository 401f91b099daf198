//! What the card is doing, as NVML tells it: clocks, power, temperature, throttle reasons.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use serde::{Deserialize, Serialize};

/// A moment of a card; nothing where NVML refuses.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardState {
    /// The SM clock.
    pub sm_mhz: Option<f64>,
    /// The SM clock at its highest.
    pub sm_max_mhz: Option<f64>,
    /// The memory's clock.
    pub memory_mhz: Option<f64>,
    /// Power, as the driver averages it.
    pub power_w: Option<f64>,
    /// The power limit that the card runs under now.
    pub power_limit_w: Option<f64>,
    /// The GPU's temperature.
    pub celsius: Option<f64>,
    /// What holds the clocks back; `idle` says nothing about a run.
    pub reasons: BTreeSet<String>,
}

impl CardState {
    /// In a line, for people.
    pub fn line(&self) -> String {
        let number = |value: Option<f64>| value.map_or("?".into(), |value| format!("{value:.0}"));
        let reasons: Vec<&str> = self.reasons.iter().map(String::as_str).collect();
        format!(
            "SM {} of {} MHz, memory {} MHz, {} of {} W, {} C, throttled by: {}",
            number(self.sm_mhz),
            number(self.sm_max_mhz),
            number(self.memory_mhz),
            number(self.power_w),
            number(self.power_limit_w),
            number(self.celsius),
            if reasons.is_empty() { "nothing".into() } else { reasons.join(", ") }
        )
    }
}

/// A card that can be asked.
#[derive(Clone)]
pub struct Card {
    nvml: Arc<Nvml>,
    uuid: String,
    /// The driver's version.
    pub driver: String,
}

impl Card {
    /// The card with this UUID (`GPU-...`), which counts the same whatever CUDA_VISIBLE_DEVICES hides.
    ///
    /// # Errors
    /// A sentence where there is no NVML or it refuses.
    pub fn open(uuid: &str) -> Result<Self, String> {
        let open = || {
            let nvml = Nvml::init()?;
            let driver = nvml.sys_driver_version()?;
            nvml.device_by_uuid(uuid)?;
            Ok(Self { nvml: Arc::new(nvml), uuid: uuid.into(), driver })
        };
        open().map_err(|error: nvml_wrapper::error::NvmlError| {
            format!("NVML is not to be had ({error}): no clocks, power, temperature or throttle reasons")
        })
    }

    /// The card now.
    pub fn state(&self) -> CardState {
        let Ok(device) = self.nvml.device_by_uuid(self.uuid.as_str()) else { return CardState::default() };
        let reasons = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
        CardState {
            sm_mhz: device.clock_info(Clock::SM).ok().map(f64::from),
            sm_max_mhz: device.max_clock_info(Clock::SM).ok().map(f64::from),
            memory_mhz: device.clock_info(Clock::Memory).ok().map(f64::from),
            power_w: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) * 1e-3),
            power_limit_w: device.enforced_power_limit().ok().map(|milliwatts| f64::from(milliwatts) * 1e-3),
            celsius: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
            reasons: reasons.iter_names().map(|(name, _)| name.to_lowercase()).filter(|name| name != "none").collect(),
        }
    }

    /// Asks every few milliseconds until the watch is stopped.
    pub fn watch(&self) -> Watch {
        let (card, stop, states) = (self.clone(), Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (stopped, seen) = (stop.clone(), states.clone());
        // Without a thread nothing is seen, and the point is timed all the same.
        let thread = std::thread::Builder::new().spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let state = card.state();
                seen.lock().unwrap_or_else(PoisonError::into_inner).push(state);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        Watch { stop, states, thread: thread.ok() }
    }
}

/// A thread that keeps asking a card.
pub struct Watch {
    stop: Arc<AtomicBool>,
    states: Arc<Mutex<Vec<CardState>>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// What was seen.
    pub fn stop(self) -> Vec<CardState> {
        self.stop.store(true, Ordering::Relaxed);
        // It cannot panic: if it did, what it saw until then is here all the same.
        let _ = self.thread.map(JoinHandle::join);
        std::mem::take(&mut self.states.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_is_not_there_is_told_in_a_sentence() {
        let Err(error) = Card::open("GPU-00000000-0000-0000-0000-000000000000") else { panic!("no such card exists") };
        assert!(error.starts_with("NVML is not to be had ("), "{error}");
    }

    #[test]
    fn a_state_in_a_line() {
        let state = CardState { sm_mhz: Some(1980.0), reasons: ["sw_power_cap".into()].into(), ..CardState::default() };
        assert_eq!(state.line(), "SM 1980 of ? MHz, memory ? MHz, ? of ? W, ? C, throttled by: sw_power_cap");
    }
}
