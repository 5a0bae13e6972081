//! Matrix products, mostly by cuBLASLt: `y = x * weight^T`, bf16 in, f32 accumulation.
//!
//! cuBLASLt is column-major: row-major `x [m, k]` is `k x m` to it, `weight [n, k]` is `k x n` and
//! `y [m, n]` is `n x m`, so the product asked for is `y = transposed(weight) * x`.
//! Few rows are also tried with kernels of our own, [`inflight_kernels::ops::gemv`] and
//! [`inflight_kernels::ops::flat_gemm`].
//!
//! [`fp8`]: weights in fp8, which few rows of x meet as they are, and many rounded to fp8 too.
//! [`problem`]: which products are computed alike. [`descriptor`]: what cuBLASLt is told.
//! [`candidates`]: what could compute a problem. [`tune`]: the fastest of them, timed with a cold
//! L2 and with the [`neighbours`] that products have in the loop. [`store`]: the choices of earlier
//! runs. [`table`]: all that for people. [`hopper`], [`gated`]: products that do what comes next
//! too. [`library`]: cuBLASLt alone, to compare with. [`parts`]: its sums in parts, for a norm.

mod candidates;
mod descriptor;
mod fp8;
mod gated;
mod hopper;
mod library;
mod neighbours;
mod parts;
mod problem;
mod store;
mod table;
mod tune;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use cudarc::{cublaslt::sys as lt, driver::sys};
use inflight_kernels::{
    Arch, Element as KernelElement,
    ops::{
        flat_gemm::{FlatGemm, FlatGemmParams, FlatShape, Ring},
        gemv::{Gemv, GemvParams},
    },
};
pub(super) use parts::Parts;
pub(super) use problem::{Problem, row_bucket};
pub(super) use store::MethodStore;
pub use table::{Tuned, TunedKind, TunedProduct};

use self::{
    descriptor::{Layouts, ProductDescriptor},
    fp8::Fp8Kernels,
    gated::GatedGemms,
    hopper::HopperGemms,
    neighbours::Neighbours,
    problem::{NextKind, WeightKind},
};
use super::{
    by_key::ByKey,
    check::{check_blas, lost},
    device::Device,
    loaded::{KernelLoader, Loaded, unsupported},
    memory::{Allocation, Element},
    rehearsal,
    stream::CudaStream,
    weights::{MatrixElements, MatrixPlace},
};
use crate::BackendError;

/// Elements of a matrix that is read faster than a kernel is launched.
const SMALL_MATRIX: usize = 2 << 20;

/// cuBLASLt, our own kernels, and how every product met so far is computed.
pub(super) struct Gemm {
    device: Arc<Device>,
    loader: Arc<KernelLoader>,
    /// By rows, whether the output is f32, and whether it is added to.
    gemv: ByKey<(usize, bool, bool), Loaded<Gemv>>,
    flat: ByKey<FlatGemm, Loaded<FlatGemm>>,
    fp8: Fp8Kernels,
    hopper: HopperGemms,
    gated: GatedGemms,
    neighbours: Neighbours,
    /// Whether there are weights in fp8 that kernels of ours multiply with activations as codes.
    takes_codes: AtomicBool,
    handle: lt::cublasLtHandle_t,
    state: Mutex<State>,
}

struct State {
    plans: HashMap<Problem, Plan>,
    /// Of cuBLASLt alone.
    library_plans: HashMap<Problem, Plan>,
    /// Matrices of the same shape, between which tuning turns so that none is in the L2 cache.
    weights: HashMap<(usize, usize, WeightKind), Vec<WeakMatrix>>,
    store: MethodStore,
}

/// A matrix that products are made with, for as long as it lives.
struct WeakMatrix {
    elements: Weak<Allocation>,
    /// And whether they are of blocks.
    scales: Option<(Weak<Allocation>, bool)>,
}

/// How products of one [`Problem`] are computed.
struct Plan {
    descriptors: Descriptors,
    method: Method,
}

/// What cuBLASLt is told of an operation.
struct Descriptors {
    /// With operands in bf16.
    bf16: ProductDescriptor,
    /// With operands in fp8, a scale for each row of either; for weights that have these.
    fp8: Option<ProductDescriptor>,
}

/// What can compute a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    /// cuBLASLt, by one of its algorithms; where weights are in fp8, with x rounded to it too.
    Library(lt::cublasLtMatmulAlgo_t),
    /// cuBLASLt, whose sums are left in parts, which the norm behind adds up.
    InParts { algorithm: lt::cublasLtMatmulAlgo_t, num_parts: usize },
    /// cuBLASLt, after weights in fp8 have been expanded to bf16.
    Expanded(lt::cublasLtMatmulAlgo_t),
    /// Our kernel for very few rows.
    Gemv,
    /// Our kernel for few rows.
    Flat(Ring),
    /// Our kernels for few rows on Hopper, which do what comes next as well.
    Hopper,
    /// Our kernel for many rows on Hopper, which does SiLU too; where weights are in fp8, with x
    /// rounded to it too.
    Gated,
}

impl Method {
    /// Whether what comes next is done as well.
    fn does_next(self) -> bool {
        matches!(self, Self::Hopper | Self::Gated | Self::InParts { .. })
    }
}

/// A bias, `[n]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bias {
    /// As f32, for our kernels.
    pub(super) f32: sys::CUdeviceptr,
    /// In the output's type, for cuBLASLt.
    pub(super) like_out: sys::CUdeviceptr,
}

/// One product's operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// `[num_rows, k]`, bf16.
    pub(super) x: sys::CUdeviceptr,
    /// `[n, k]`.
    pub(super) weight: MatrixPlace,
    pub(super) bias: Option<Bias>,
    /// `[num_rows, n]`.
    pub(super) out: sys::CUdeviceptr,
    pub(super) out_element: Element,
    pub(super) num_rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Add to `out` instead of overwriting it.
    pub(super) accumulate: bool,
    pub(super) next: Next,
}

/// What is to be computed of a product, by the same kernels if that is faster.
#[derive(Clone, Copy, Debug)]
pub(super) enum Next {
    Nothing,
    /// `out = silu(a) * b` of its halves, bf16.
    Silu {
        /// `[num_rows, n / 2]`. Of the product itself nothing may remain.
        out: sys::CUdeviceptr,
    },
    Norm(Norm),
    /// What reads it next adds up its parts, if it is left in parts.
    Rope,
}

/// RMSNorm of what was added to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    /// `[n]`, f32.
    pub(super) weight: sys::CUdeviceptr,
    /// `[num_rows, n]`, bf16.
    pub(super) out: sys::CUdeviceptr,
    pub(super) eps: f32,
}

/// What cuBLASLt multiplies: [`Product`]'s, or those in another type.
#[derive(Clone, Copy)]
struct Operands {
    element: Element,
    weight: sys::CUdeviceptr,
    x: sys::CUdeviceptr,
}

/// Where what cuBLASLt is called for lies.
#[derive(Clone, Copy)]
struct LibraryCall {
    weight: sys::CUdeviceptr,
    x: sys::CUdeviceptr,
    out: sys::CUdeviceptr,
    /// What the output counts for that is there already.
    beta: f32,
    /// Address and bytes.
    workspace: (sys::CUdeviceptr, usize),
}

impl WeakMatrix {
    fn new(elements: &MatrixElements) -> Self {
        match elements {
            MatrixElements::Bf16(elements) => {
                Self { elements: Arc::downgrade(elements), scales: None }
            }
            MatrixElements::Fp8 { codes, scales, blocks } => Self {
                elements: Arc::downgrade(codes),
                scales: Some((Arc::downgrade(scales), *blocks)),
            },
        }
    }

    fn upgrade(&self) -> Option<MatrixElements> {
        let elements = self.elements.upgrade()?;
        Some(match &self.scales {
            None => MatrixElements::Bf16(elements),
            Some((scales, blocks)) => {
                MatrixElements::Fp8 { codes: elements, scales: scales.upgrade()?, blocks: *blocks }
            }
        })
    }
}

impl Descriptors {
    fn new(problem: Problem) -> Result<Self, BackendError> {
        let bias = problem.bias.then(|| problem.out_element());
        let scaled = (problem.weights == WeightKind::Fp8).then(|| ProductDescriptor::scaled(bias));
        Ok(Self { bf16: ProductDescriptor::new(bias)?, fp8: scaled.transpose()? })
    }
}

// SAFETY: cuBLASLt's handle may be used from any thread; plans are behind a lock.
unsafe impl Send for Gemm {}
// SAFETY: as above.
unsafe impl Sync for Gemm {}

impl Gemm {
    /// `store` holds the choices of earlier runs.
    pub(super) fn new(
        loader: &Arc<KernelLoader>,
        store: MethodStore,
    ) -> Result<Self, BackendError> {
        let device = &loader.device;
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` is a valid place for the result; destroyed in `drop`.
        check_blas("cublasLtCreate", unsafe { lt::cublasLtCreate(&raw mut handle) })?;
        let (plans, library_plans, weights) = <_>::default();
        let state = State { plans, library_plans, weights, store };
        Ok(Self {
            device: Arc::clone(device),
            loader: Arc::clone(loader),
            gemv: ByKey::default(),
            flat: ByKey::default(),
            fp8: Fp8Kernels::default(),
            hopper: HopperGemms::new(loader),
            gated: GatedGemms::new(loader),
            neighbours: Neighbours::new(loader),
            takes_codes: AtomicBool::new(false),
            handle,
            state: Mutex::new(state),
        })
    }

    /// Tells of a matrix that products will be made with.
    pub(super) fn add_weight(&self, weight: &MatrixElements, n: usize, k: usize) {
        let key = (n, k, WeightKind::of(weight.place()));
        if key.2 != WeightKind::Bf16 && self.loader.gpu.arch == Arch::SM_90A {
            self.takes_codes.store(true, Ordering::Relaxed);
        }
        self.lock().weights.entry(key).or_default().push(WeakMatrix::new(weight));
    }

    /// Whether operators in front of products had better leave activations as codes as well.
    pub(super) fn takes_codes(&self) -> bool {
        self.takes_codes.load(Ordering::Relaxed)
    }

    /// Chooses the algorithm for `product`, unless that was done before. Allocates and waits for
    /// the device, so it must not happen while a graph is being captured.
    pub(super) fn prepare(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        self.device.bind()?;
        stream.workspace()?;
        let problem = Problem::of(product);
        let mut state = self.lock();
        let method = self.planned(&mut state, problem, stream)?;
        self.load(method, product, stream)
    }

    /// How `problem` is computed; chosen now, if it was not before.
    fn planned(
        &self,
        state: &mut State,
        problem: Problem,
        stream: &CudaStream,
    ) -> Result<Method, BackendError> {
        if let Some(plan) = state.plans.get(&problem) {
            return Ok(plan.method);
        }
        let plan = self.plan(state, problem, stream)?;
        let method = plan.method;
        state.plans.insert(problem, plan);
        Ok(method)
    }

    /// Loads the kernels that `product` needs of ours, and finds room for operands in another type.
    fn load(
        &self,
        method: Method,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        match (product.weight, method) {
            (MatrixPlace::Fp8 { .. }, _) => self.load_fp8(method, product, stream),
            (MatrixPlace::Bf16(_), Method::Library(_) | Method::Expanded(_)) => Ok(()),
            (MatrixPlace::Bf16(_), Method::InParts { .. }) => self.hopper.add_norm(false).map(drop),
            (MatrixPlace::Bf16(_), Method::Gemv) => self.gemv(product).map(drop),
            (MatrixPlace::Bf16(_), Method::Flat(ring)) => self.flat(product, ring).map(drop),
            (MatrixPlace::Bf16(_), Method::Hopper) => self.hopper.load(product, stream),
            (MatrixPlace::Bf16(_), Method::Gated) => self.gated.load(product).map(drop),
        }
    }

    /// Enqueues `product`, which was prepared; whether what comes next is done as well.
    pub(super) fn enqueue(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<bool, BackendError> {
        self.device.bind()?;
        let state = self.lock();
        let plan = state.plans.get(&Problem::of(product));
        let plan = plan.ok_or_else(|| lost("matmul", "a product was not prepared"))?;
        self.launch(plan, product, stream)?;
        Ok(plan.method.does_next())
    }

    /// Where the parts of an enqueued product are, which is followed by [`Next::Rope`].
    pub(super) fn parts(
        &self,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<Parts, BackendError> {
        self.hopper.parts(product, stream)
    }

    fn launch(
        &self,
        plan: &Plan,
        product: &Product,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        let MatrixPlace::Bf16(weight) = product.weight else {
            return self.launch_fp8(plan, product, stream);
        };
        match &plan.method {
            Method::Library(algorithm) | Method::Expanded(algorithm) => {
                let operands = Operands { element: Element::Bf16, weight, x: product.x };
                let descriptor = &plan.descriptors.bf16;
                self.launch_library(descriptor, algorithm, (product, operands), stream)
            }
            Method::InParts { algorithm, num_parts } => {
                let descriptor = &plan.descriptors.bf16;
                let how = (algorithm, *num_parts);
                self.launch_in_parts(descriptor, how, (product, weight), stream)
            }
            Method::Gemv => self.gemv(product)?.launch(&gemv_params(product, weight), stream),
            Method::Flat(ring) => {
                self.flat(product, *ring)?.launch(&flat_params(product, weight), stream)
            }
            Method::Hopper => self.hopper.launch(product, stream),
            Method::Gated => self.gated.launch(product, None, stream),
        }
    }

    /// Our kernel for few rows, for products like this one.
    fn flat(&self, product: &Product, ring: Ring) -> Result<Arc<Loaded<FlatGemm>>, BackendError> {
        let shape = FlatShape {
            num_rows: word(product.num_rows),
            rows: word(product.n),
            out: kernel_element(product.out_element),
            accumulate: product.accumulate,
        };
        let kernel = FlatGemm::new(&self.loader.gpu, shape, ring).map_err(unsupported)?;
        self.flat.get(kernel, || self.loader.load(kernel))
    }

    /// Our kernel for very few rows, for products like this one.
    fn gemv(&self, product: &Product) -> Result<Arc<Loaded<Gemv>>, BackendError> {
        let (num_rows, accumulate) = (product.num_rows, product.accumulate);
        let f32_out = product.out_element != Element::Bf16;
        self.gemv.get((num_rows, f32_out, accumulate), || {
            let out = kernel_element(product.out_element);
            self.loader.load(Gemv::new(word(num_rows), out, accumulate).map_err(unsupported)?)
        })
    }

    fn launch_library(
        &self,
        descriptor: &ProductDescriptor,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        (product, operands): (&Product, Operands),
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        if let Some(bias) = product.bias {
            descriptor.set_bias(bias.like_out)?;
        }
        let Product { num_rows, n, k, out, out_element, .. } = *product;
        let Operands { element, weight, x } = operands;
        let layouts = Layouts::new((num_rows, n, k), element, out_element)?;
        let workspace = stream.workspace()?;
        let workspace = (workspace.address(), workspace.bytes());
        let beta = if product.accumulate { 1.0 } else { 0.0 };
        let call = LibraryCall { weight, x, out, beta, workspace };
        self.call_library(descriptor, &layouts, algorithm, call, stream)
    }

    /// Enqueues what `descriptor` and `layouts` say, of buffers that are as large as these say.
    fn call_library(
        &self,
        descriptor: &ProductDescriptor,
        layouts: &Layouts,
        algorithm: &lt::cublasLtMatmulAlgo_t,
        call: LibraryCall,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        stream.set_left(None);
        let (alpha, LibraryCall { weight, x, out, beta, workspace }) = (1f32, call);
        // SAFETY: descriptor and layouts describe buffers whose sizes the caller has checked, which
        // live until the stream has used them; the workspace belongs to the stream.
        let status = unsafe {
            lt::cublasLtMatmul(
                self.handle,
                descriptor.raw(),
                (&raw const alpha).cast(),
                weight as *const _,
                layouts.weight.raw(),
                x as *const _,
                layouts.x.raw(),
                (&raw const beta).cast(),
                out as *const _,
                layouts.out.raw(),
                out as *mut _,
                layouts.out.raw(),
                algorithm,
                workspace.0 as *mut _,
                workspace.1,
                stream.raw().cast(),
            )
        };
        check_blas("cublasLtMatmul", status)
    }

    /// The stored choice if it still works, else the fastest of what could compute the problem.
    fn plan(
        &self,
        state: &mut State,
        problem: Problem,
        stream: &CudaStream,
    ) -> Result<Plan, BackendError> {
        let descriptors = Descriptors::new(problem)?;
        if let Some(method) = state.store.get(&problem)
            && self.is_usable(&descriptors, problem, method)?
        {
            return Ok(Plan { descriptors, method });
        }
        let candidates = if problem.next != NextKind::Nothing {
            self.candidates_with_next(state, &descriptors, problem, stream)?
        } else if problem.neighbours() == [problem; 2] {
            self.candidates(&descriptors, problem)?
        } else {
            self.candidates_between(state, &descriptors, problem, stream)?
        };
        let mut plan = Plan { descriptors, method: candidates[0] };
        let weights = state.weights_of(problem);
        if candidates.len() > 1 && !weights.is_empty() {
            let tune = || self.fastest(plan, &candidates, problem, &weights, stream);
            plan = rehearsal::pause(tune)?;
        }
        state.store.put(problem, plan.method);
        Ok(plan)
    }

    /// What could compute a problem and what comes next: what computes the problem alone, and our
    /// kernels that do both. Of small matrices only the latter, which are launched less often.
    fn candidates_with_next(
        &self,
        state: &mut State,
        descriptors: &Descriptors,
        problem: Problem,
        stream: &CudaStream,
    ) -> Result<Vec<Method>, BackendError> {
        let few = self.hopper.takes(problem).then_some(Method::Hopper);
        let ours = few.or_else(|| self.gated.takes(problem).then_some(Method::Gated));
        if ours.is_some() && problem.n * problem.k <= SMALL_MATRIX {
            return Ok(ours.into_iter().collect());
        }
        let mut methods = vec![self.planned(state, problem.alone(), stream)?];
        methods.extend(ours);
        methods.extend(self.candidates_in_parts(descriptors, problem)?);
        Ok(methods)
    }

    /// What could compute a problem between two powers of two: what computes those, and what
    /// cuBLASLt thinks best. Trying everything for every bucket would take ten seconds.
    fn candidates_between(
        &self,
        state: &mut State,
        descriptors: &Descriptors,
        problem: Problem,
        stream: &CudaStream,
    ) -> Result<Vec<Method>, BackendError> {
        let mut methods = self.proposed(descriptors, problem)?;
        methods.truncate(2);
        for neighbour in problem.neighbours() {
            let method = self.planned(state, neighbour, stream)?;
            if !methods.contains(&method) && self.is_usable(descriptors, problem, method)? {
                methods.push(method);
            }
        }
        Ok(methods)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Weights that products of `problem` may be tried with.
    fn weights_of(&self, problem: Problem) -> Vec<MatrixElements> {
        let weights = self.weights.get(&(problem.n, problem.k, problem.weights));
        weights.into_iter().flatten().filter_map(WeakMatrix::upgrade).collect()
    }
}

fn word(value: usize) -> u32 {
    u32::try_from(value).expect("sides of matrices fit 32 bits")
}

fn kernel_element(element: Element) -> KernelElement {
    if element == Element::Bf16 { KernelElement::Bf16 } else { KernelElement::F32 }
}

fn flat_params(product: &Product, weight: sys::CUdeviceptr) -> FlatGemmParams {
    FlatGemmParams {
        x: product.x,
        weight,
        bias: product.bias.map_or(0, |bias| bias.f32),
        out: product.out,
        num_rows: word(product.num_rows),
        rows: word(product.n),
        cols: word(product.k),
    }
}

fn gemv_params(product: &Product, weight: sys::CUdeviceptr) -> GemvParams {
    GemvParams {
        x: product.x,
        weight,
        bias: product.bias.map_or(0, |bias| bias.f32),
        out: product.out,
        rows: word(product.n),
        cols: word(product.k),
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: created in `new` and destroyed once. A failure leaks host memory, no more.
            let _ = unsafe { lt::cublasLtDestroy(self.handle) };
        }
    }
}
