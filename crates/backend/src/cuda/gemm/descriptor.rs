//! What cuBLASLt is told about a product: owned descriptors.

use std::ffi::c_void;

use cudarc::{cublaslt::sys as lt, driver::sys::CUdeviceptr};
use inflight_kernels::ops::fp8_quantize::fp8_row_bytes;

use crate::{
    BackendError,
    cuda::{check::check_blas, memory::Element},
};

/// `CUBLAS_OP_T` of cuBLAS, whose types cuBLASLt's binding lacks.
const TRANSPOSED: i32 = 1;

/// The operation: the first operand transposed, f32 accumulation, perhaps a bias.
pub(super) struct ProductDescriptor(lt::cublasLtMatmulDesc_t);

impl ProductDescriptor {
    /// `bias`: its type, if one is to be added; it must be that of the output.
    pub(super) fn new(bias: Option<Element>) -> Result<Self, BackendError> {
        use lt::cublasLtMatmulDescAttributes_t as Attribute;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result; destroyed in `drop`.
        let status = unsafe {
            lt::cublasLtMatmulDescCreate(
                &raw mut raw,
                lt::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                lt::cudaDataType_t::CUDA_R_32F,
            )
        };
        check_blas("cublasLtMatmulDescCreate", status)?;
        let descriptor = Self(raw);
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if let Some(element) = bias {
            let epilogue = lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            let element = data_type(element);
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &element)?;
        }
        Ok(descriptor)
    }

    /// For operands in fp8 with a scale for each row of either; `bias` as in [`Self::new`].
    pub(super) fn scaled(bias: Option<Element>) -> Result<Self, BackendError> {
        use lt::cublasLtMatmulDescAttributes_t as Attribute;
        let descriptor = Self::new(bias)?;
        let mode = lt::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode)?;
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode)?;
        // Sums as tensor cores keep them, in some 14 bits: that costs a tenth or less of what
        // rounding operands to fp8 has cost, and exact sums take 5 to 13 % longer on an H200.
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1_i8)?;
        // Proposals are made only for what has addresses; the next product's replace these.
        descriptor.set_scales(16, 16)?;
        Ok(descriptor)
    }

    /// Where the scales of the next product are: of the weights' rows, and of those of x.
    pub(super) fn set_scales(
        &self,
        weight: CUdeviceptr,
        x: CUdeviceptr,
    ) -> Result<(), BackendError> {
        use lt::cublasLtMatmulDescAttributes_t as Attribute;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &weight)?;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x)
    }

    /// Where the bias of the next product is.
    pub(super) fn set_bias(&self, bias: CUdeviceptr) -> Result<(), BackendError> {
        self.set(lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)
    }

    pub(super) fn raw(&self) -> lt::cublasLtMatmulDesc_t {
        self.0
    }

    fn set<T>(
        &self,
        attribute: lt::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<(), BackendError> {
        let value: *const T = value;
        // SAFETY: the descriptor lives; `value` is of the size given and is copied.
        let status = unsafe {
            lt::cublasLtMatmulDescSetAttribute(self.0, attribute, value.cast(), size_of::<T>())
        };
        check_blas("cublasLtMatmulDescSetAttribute", status)
    }
}

impl Drop for ProductDescriptor {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed once. A failure leaks host memory, no more.
        let _ = unsafe { lt::cublasLtMatmulDescDestroy(self.0) };
    }
}

fn data_type(element: Element) -> lt::cudaDataType_t {
    match element {
        Element::Bf16 => lt::cudaDataType_t::CUDA_R_16BF,
        Element::Fp8 => lt::cudaDataType_t::CUDA_R_8F_E4M3,
        Element::F32 | Element::Word => lt::cudaDataType_t::CUDA_R_32F,
    }
}

/// Places of the three operands.
pub(super) struct Layouts {
    /// `[n, k]`.
    pub(super) weight: Layout,
    /// `[num_rows, k]`.
    pub(super) x: Layout,
    /// `[num_rows, n]`.
    pub(super) out: Layout,
}

impl Layouts {
    /// Of a product of `x [num_rows, k]` and `weight [n, k]`, both of `operands`.
    pub(super) fn new(
        (num_rows, n, k): (usize, usize, usize),
        operands: Element,
        out: Element,
    ) -> Result<Self, BackendError> {
        // Rows of codes are padded, with zeros.
        let k = if operands == Element::Fp8 { fp8_row_bytes(k) } else { k };
        Ok(Self {
            weight: Layout::new(operands, k, n)?,
            x: Layout::new(operands, k, num_rows)?,
            out: Layout::new(out, n, num_rows)?,
        })
    }

    /// Of such a product of bf16 in so many parts, each over a stretch of k: a batch of products.
    /// `out` is `[num_parts, num_rows, n]`, f32.
    pub(super) fn in_parts(
        (num_rows, n, k): (usize, usize, usize),
        num_parts: usize,
    ) -> Result<Self, BackendError> {
        let len = k / num_parts;
        let of_rows = |rows| Layout::strided(Element::Bf16, (len, rows), k)?.batch(num_parts, len);
        let out = Layout::new(Element::F32, n, num_rows)?;
        Ok(Self {
            weight: of_rows(n)?,
            x: of_rows(num_rows)?,
            out: out.batch(num_parts, n * num_rows)?,
        })
    }
}

/// A column-major matrix, or a batch of them.
pub(super) struct Layout(lt::cublasLtMatrixLayout_t);

impl Layout {
    /// A matrix without gaps.
    fn new(element: Element, rows: usize, cols: usize) -> Result<Self, BackendError> {
        Self::strided(element, (rows, cols), rows)
    }

    /// A matrix whose columns begin `stride` elements apart.
    fn strided(
        element: Element,
        (rows, cols): (usize, usize),
        stride: usize,
    ) -> Result<Self, BackendError> {
        let element = data_type(element);
        let (rows, cols, stride) = (rows as u64, cols as u64, stride as i64);
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result; destroyed in `drop`.
        let status =
            unsafe { lt::cublasLtMatrixLayoutCreate(&raw mut raw, element, rows, cols, stride) };
        check_blas("cublasLtMatrixLayoutCreate", status)?;
        Ok(Self(raw))
    }

    /// So many of these, that begin `offset` elements apart.
    fn batch(self, count: usize, offset: usize) -> Result<Self, BackendError> {
        use lt::cublasLtMatrixLayoutAttribute_t as Attribute;
        let (count, offset) = (count as i32, offset as i64);
        self.set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count)?;
        self.set(Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset)?;
        Ok(self)
    }

    fn set<T>(
        &self,
        attribute: lt::cublasLtMatrixLayoutAttribute_t,
        value: &T,
    ) -> Result<(), BackendError> {
        let value: *const T = value;
        // SAFETY: the layout lives; `value` is of the size given and is copied.
        let status = unsafe {
            lt::cublasLtMatrixLayoutSetAttribute(self.0, attribute, value.cast(), size_of::<T>())
        };
        check_blas("cublasLtMatrixLayoutSetAttribute", status)
    }

    pub(super) fn raw(&self) -> lt::cublasLtMatrixLayout_t {
        self.0
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed once. A failure leaks host memory, no more.
        let _ = unsafe { lt::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// What algorithms may do: use a workspace, and add up partial sums in f32 there, in order.
pub(super) struct Preference(lt::cublasLtMatmulPreference_t);

impl Preference {
    pub(super) fn new(workspace_bytes: usize) -> Result<Self, BackendError> {
        use lt::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a valid place for the result; destroyed in `drop`.
        let status = unsafe { lt::cublasLtMatmulPreferenceCreate(&raw mut raw) };
        check_blas("cublasLtMatmulPreferenceCreate", status)?;
        let preference = Self(raw);
        let workspace = workspace_bytes as u64;
        let schemes = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let (size, value) = (size_of::<u64>(), (&raw const workspace).cast());
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, value, size)?;
        let (size, value) = (size_of::<u32>(), (&raw const schemes).cast());
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, value, size)?;
        Ok(preference)
    }

    pub(super) fn raw(&self) -> lt::cublasLtMatmulPreference_t {
        self.0
    }

    fn set(
        &self,
        attribute: lt::cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        size: usize,
    ) -> Result<(), BackendError> {
        // SAFETY: the preference lives; `value` points to `size` bytes, which are copied.
        let status =
            unsafe { lt::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, value, size) };
        check_blas("cublasLtMatmulPreferenceSetAttribute", status)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed once. A failure leaks host memory, no more.
        let _ = unsafe { lt::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}
