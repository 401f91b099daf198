//! Libraries through their C entries.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use hopper_attention::cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _};
use hopper_attention::{Float, Layout};

use super::WORKSPACE_BYTES;
use crate::entry::{Args, BackwardArgs, Biasing, Dropping, Entry, Numbers, Packing};
use crate::harness::contest::{Contestant, Outputs, Refusal, Task};
use crate::point::BiasTensor;
use crate::{Point, Role};

/// A library, the stream that it enqueues on, and what it reads.
pub(super) struct Library<'a, T> {
    pub name: &'a str,
    pub role: Role,
    pub entry: Entry,
    pub stream: Arc<CudaStream>,
    /// Q, K, V and dO.
    pub inputs: Arc<Vec<CudaSlice<T>>>,
}

impl<T: Float> Library<'_, T> {
    /// The addresses of Q, K, V and dO.
    fn inputs(&self) -> [*const c_void; 4] {
        [0, 1, 2, 3].map(|i| self.address(&self.inputs[i]))
    }

    fn address<E>(&self, memory: &CudaSlice<E>) -> *const c_void {
        memory.device_ptr(&self.stream).0 as *const c_void
    }

    /// Memory full of NaN.
    fn poisoned<E: Float>(&self, elements: usize) -> Result<CudaSlice<E>> {
        Ok(self.stream.clone_htod(&vec![E::from_f32(f32::NAN); elements])?)
    }

    /// The offsets of a point's packed sequences, and what the entry is told of them. Refuses them for a library that
    /// knows none, and a cap of the scores for one that knows no such thing.
    fn packing(&self, point: &Point) -> Result<(Option<CudaSlice<i32>>, Packing), Refusal> {
        if point.softcap.is_some() && !self.entry.caps() {
            return Err(Refusal::Unsupported(format!("{} exports no hattn_peer_caps", self.name)));
        }
        let Some(packed) = &point.packed else { return Ok((None, Packing::NONE)) };
        if !self.entry.packs() {
            return Err(Refusal::Unsupported(format!("{} exports no hattn_peer_packs", self.name)));
        }
        let offsets = self.stream.clone_htod(&packed.offsets()).map_err(anyhow::Error::from)?;
        let longest = i32::try_from(packed.longest()).map_err(anyhow::Error::from)?;
        let packing = Packing { cu_seqlens: self.address(&offsets).cast(), longest, reserved: 0 };
        Ok((Some(offsets), packing))
    }

    /// ALiBi's slopes of a point, if it has any. Refuses them for a library that knows no such thing.
    fn slopes(&self, point: &Point) -> Result<Option<CudaSlice<f32>>, Refusal> {
        let Some(slopes) = point.slopes() else { return Ok(None) };
        if !self.entry.biases() {
            return Err(Refusal::Unsupported(format!("{} exports no hattn_peer_biases", self.name)));
        }
        Ok(Some(self.stream.clone_htod(&slopes).map_err(anyhow::Error::from)?))
    }

    /// The lists of blocks of a point, if it has any: counts and indices of full blocks, and counts of partial ones. Refuses them for
    /// a library that knows no such thing.
    fn lists(&self, point: &Point) -> Result<Option<[CudaSlice<i32>; 3]>, Refusal> {
        let Some(lists) = point.full_blocks() else { return Ok(None) };
        if !self.entry.lists() {
            return Err(Refusal::Unsupported(format!("{} exports no hattn_peer_lists", self.name)));
        }
        let copied = |list: &[i32]| self.stream.clone_htod(list).map_err(anyhow::Error::from);
        Ok(Some([copied(&lists.counts)?, copied(&lists.indices)?, copied(&lists.none)?]))
    }

    /// The seed and the offset of a point's dropout, if it has any, and what the entry is told of it. Refuses it for a library that
    /// knows no such thing, or that keeps other pairs than those that outputs are held against.
    fn dropping(&self, point: &Point) -> Result<(Option<CudaSlice<i32>>, Dropping), Refusal> {
        let (Some(state), Some(percent)) = (point.dropout_state(), point.dropout) else {
            return Ok((None, Dropping::NONE));
        };
        if !self.entry.drops() {
            return Err(Refusal::Unsupported(format!("{} exports no hattn_peer_drops", self.name)));
        }
        let state = self.stream.clone_htod(&state).map_err(anyhow::Error::from)?;
        let dropout_state = self.address(&state).cast();
        Ok((Some(state), Dropping { dropout_state, dropout: percent as f32 / 100.0, reserved: 0 }))
    }

    /// The bias of a point, if it has any, and what the entry is told of it. Refuses it for a library that knows no such thing.
    fn biasing(&self, task: &Task<'_, T>) -> Result<(Option<CudaSlice<u8>>, Biasing), Refusal> {
        let Some(form) = task.point.bias.option() else { return Ok((None, Biasing::NONE)) };
        if !self.entry.adds() {
            return Err(Refusal::Unsupported(format!("{} exports no hattn_peer_adds", self.name)));
        }
        let numbers = task.bias.context("the point's bias was not drawn")?;
        let bias = self.stream.clone_htod(numbers.bytes()).map_err(anyhow::Error::from)?;
        let biasing = Biasing::of(self.address(&bias), form);
        Ok((Some(bias), biasing))
    }

    /// The addresses of lists that may be missing.
    fn addresses(&self, lists: Option<&[CudaSlice<i32>; 3]>) -> [*const i32; 3] {
        lists.map_or([std::ptr::null(); 3], |lists| lists.each_ref().map(|list| self.address(list).cast()))
    }

    /// The address of a tensor that may be missing.
    fn address_or_null(&self, memory: Option<&CudaSlice<f32>>) -> *const f32 {
        memory.map_or(std::ptr::null(), |memory| self.address(memory).cast())
    }

    /// What a status of the entry means.
    fn told(&self, status: c_int) -> Result<(), Refusal> {
        match status {
            0 => Ok(()),
            status if Entry::unsupported(status) => Err(Refusal::Unsupported(self.entry.complaint(status))),
            status => Err(Refusal::Failed(self.entry.complaint(status))),
        }
    }
}

fn strides(layout: &Layout<4>) -> [i64; 3] {
    let [batch, seqlen, head, _] = layout.stride();
    [batch, seqlen, head]
}

/// Its forward.
pub(super) struct Forward<'a, T> {
    library: Library<'a, T>,
    workspace: Rc<RefCell<CudaSlice<u8>>>,
    o: CudaSlice<T>,
    lse: CudaSlice<f32>,
    offsets: Option<CudaSlice<i32>>,
    slopes: Option<CudaSlice<f32>>,
    lists: Option<[CudaSlice<i32>; 3]>,
    state: Option<CudaSlice<i32>>,
    bias: Option<CudaSlice<u8>>,
    args: Option<Args>,
}

impl<'a, T: Float> Forward<'a, T> {
    /// With scratch that all libraries share.
    pub fn new(library: Library<'a, T>, workspace: Rc<RefCell<CudaSlice<u8>>>) -> Result<Self> {
        let (o, lse, offsets, slopes) = (library.poisoned(1)?, library.poisoned(1)?, None, None);
        Ok(Self { o, lse, library, workspace, offsets, slopes, lists: None, state: None, bias: None, args: None })
    }
}

impl<T: Float> Contestant<T> for Forward<'_, T> {
    fn name(&self) -> &str {
        self.library.name
    }

    fn role(&self) -> Role {
        self.library.role
    }

    fn prepare(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        let library = &self.library;
        let packing;
        (self.offsets, packing) = library.packing(task.point)?;
        self.slopes = library.slopes(task.point)?;
        self.lists = library.lists(task.point)?;
        let dropping;
        (self.state, dropping) = library.dropping(task.point)?;
        let biasing;
        (self.bias, biasing) = library.biasing(task)?;
        let [full_block_cnt, full_block_idx, mask_block_cnt] = library.addresses(self.lists.as_ref());
        self.o = library.poisoned(task.o.span())?;
        self.lse = library.poisoned(task.lse.span())?;
        let mut workspace = self.workspace.borrow_mut();
        let workspace_bytes = workspace.len() as u64;
        let [q, k, v, _] = library.inputs();
        self.args = Some(Args {
            struct_bytes: size_of::<Args>() as u64,
            q,
            k,
            v,
            o: self.o.device_ptr_mut(&library.stream).0 as *mut c_void,
            lse: self.lse.device_ptr_mut(&library.stream).0 as *mut f32,
            q_stride: strides(&task.q),
            k_stride: strides(&task.k),
            v_stride: strides(&task.v),
            o_stride: strides(&task.o),
            numbers: Numbers::of(task.point)?,
            stream: library.stream.cu_stream().cast(),
            workspace: workspace.device_ptr_mut(&library.stream).0 as *mut c_void,
            workspace_bytes,
            packing,
            alibi_slopes: library.address_or_null(self.slopes.as_ref()),
            full_block_cnt,
            full_block_idx,
            mask_block_cnt,
            dropping,
            biasing,
        });
        Ok(())
    }

    fn call(&mut self, _: &Task<'_, T>) -> Result<(), Refusal> {
        let args = self.args.context("not prepared")?;
        // SAFETY: the addresses are of live buffers of this stream's context, as large as the layouts reach; all the
        // work is on one stream, which is waited for before they are read or freed.
        self.library.told(unsafe { (self.library.entry.forward)(&args) })
    }

    fn outputs(&mut self) -> Result<Outputs<T>> {
        let stream = &self.library.stream;
        Ok(Outputs { tensors: vec![stream.clone_dtoh(&self.o)?], lse: stream.clone_dtoh(&self.lse)?, d_bias: None })
    }
}

/// Its backward.
pub(super) struct Backward<'a, T> {
    library: Library<'a, T>,
    ready: Option<Ready<T>>,
}

/// For one point.
struct Ready<T> {
    /// What the arguments point to besides the inputs: O, the LSE, scratch and offsets, and slopes, lists of blocks and
    /// the state of dropout.
    _saved: (CudaSlice<T>, CudaSlice<f32>, CudaSlice<u8>, Option<CudaSlice<i32>>),
    _modifiers: (Option<CudaSlice<f32>>, Option<[CudaSlice<i32>; 3]>),
    _state: Option<CudaSlice<i32>>,
    _bias: Option<CudaSlice<u8>>,
    /// dQ, dK and dV.
    gradients: [CudaSlice<T>; 3],
    /// That of the bias, and the point that it is of.
    d_bias: Option<(CudaSlice<u8>, Point)>,
    args: BackwardArgs,
}

impl<'a, T> Backward<'a, T> {
    pub fn new(library: Library<'a, T>) -> Self {
        Self { library, ready: None }
    }
}

impl<T: Float> Contestant<T> for Backward<'_, T> {
    fn name(&self) -> &str {
        self.library.name
    }

    fn role(&self) -> Role {
        self.library.role
    }

    fn prepare(&mut self, task: &Task<'_, T>) -> Result<(), Refusal> {
        self.ready = None; // a library that does not compute this point holds no memory
        let library = &self.library;
        if library.entry.backward.is_none() {
            return Err(Refusal::Unsupported(format!("{} exports no hattn_peer_bwd", library.name)));
        }
        let (offsets, packing) = library.packing(task.point)?;
        let (slopes, lists) = (library.slopes(task.point)?, library.lists(task.point)?);
        let (state, dropping) = library.dropping(task.point)?;
        let (bias, biasing) = library.biasing(task)?;
        let [full_block_cnt, full_block_idx, mask_block_cnt] = library.addresses(lists.as_ref());
        let (stream, driver, saved) = (&library.stream, anyhow::Error::from, task.saved()?);
        let o = saved.tensors.first().context("the forward left no O")?;
        let o = stream.clone_htod(o).map_err(driver)?;
        let lse = stream.clone_htod(&saved.lse).map_err(driver)?;
        let poisoned = |layout: &Layout<4>| library.poisoned(layout.span());
        let mut gradients = [poisoned(&task.q)?, poisoned(&task.k)?, poisoned(&task.v)?];
        let unwritten = task.point.bias_gradient()?.map(|nan| stream.clone_htod(nan.bytes()));
        let mut d_bias = unwritten.transpose().map_err(driver)?;
        let [q, k, v, d_o] = library.inputs();
        let [d_q, d_k, d_v] = gradients.each_mut().map(|memory| memory.device_ptr_mut(stream).0 as *mut c_void);
        let [of_q, of_k, of_v, of_o] = [&task.q, &task.k, &task.v, &task.o].map(strides);
        let mut args = BackwardArgs {
            struct_bytes: size_of::<BackwardArgs>() as u64,
            q,
            k,
            v,
            o: library.address(&o),
            d_o,
            lse: library.address(&lse).cast(),
            d_q,
            d_k,
            d_v,
            q_stride: of_q,
            k_stride: of_k,
            v_stride: of_v,
            o_stride: of_o,
            d_o_stride: of_o,
            d_q_stride: of_q,
            d_k_stride: of_k,
            d_v_stride: of_v,
            numbers: Numbers::of(task.point)?,
            stream: stream.cu_stream().cast(),
            workspace: std::ptr::null_mut(),
            workspace_bytes: WORKSPACE_BYTES as u64,
            packing,
            alibi_slopes: library.address_or_null(slopes.as_ref()),
            full_block_cnt,
            full_block_idx,
            mask_block_cnt,
            dropping,
            biasing,
            d_bias: d_bias
                .as_mut()
                .map_or(std::ptr::null_mut(), |memory| memory.device_ptr_mut(stream).0 as *mut c_void),
        };
        if let Some(workspace) = library.entry.backward_workspace {
            let mut bytes = 0;
            // SAFETY: live structs.
            library.told(unsafe { workspace(&args, &mut bytes) })?;
            args.workspace_bytes = bytes;
        }
        let bytes = usize::try_from(args.workspace_bytes).unwrap_or(usize::MAX);
        let mut scratch = stream.alloc_zeros(bytes.max(1)).map_err(driver)?;
        args.workspace = scratch.device_ptr_mut(stream).0 as *mut c_void;
        self.ready = Some(Ready {
            _saved: (o, lse, scratch, offsets),
            _modifiers: (slopes, lists),
            _state: state,
            _bias: bias,
            gradients,
            d_bias: d_bias.map(|memory| (memory, task.point.clone())),
            args,
        });
        Ok(())
    }

    fn call(&mut self, _: &Task<'_, T>) -> Result<(), Refusal> {
        let (ready, backward) = self.ready.as_ref().zip(self.library.entry.backward).context("not prepared")?;
        // SAFETY: as in the forward.
        self.library.told(unsafe { backward(&ready.args) })
    }

    fn outputs(&mut self) -> Result<Outputs<T>> {
        let ready = self.ready.as_ref().context("not prepared")?;
        let copies = ready.gradients.iter().map(|memory| self.library.stream.clone_dtoh(memory));
        let d_bias = match &ready.d_bias {
            None => None,
            Some((memory, point)) => BiasTensor::of_bytes(point, &self.library.stream.clone_dtoh(memory)?)?,
        };
        Ok(Outputs { tensors: copies.collect::<Result<_, _>>()?, lse: vec![], d_bias })
    }
}
